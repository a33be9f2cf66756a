"""The parts of :mod:`dlrm.data.prepare`: raw logs, their rows, vocabularies and restart points."""

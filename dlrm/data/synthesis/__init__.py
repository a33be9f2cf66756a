"""The parts of :mod:`dlrm.data.synthetic`: laws of the columns, rows, the truth, and files."""

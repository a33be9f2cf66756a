"""Rows for ids of 64 bits: an index from ids to slots, which admits and evicts in every step."""

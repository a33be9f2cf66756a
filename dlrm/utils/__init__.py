"""Helpers for every package: files, devices, messages, programs."""

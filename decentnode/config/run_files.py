"""File names and keys that the writers and the readers of run folders share. Imports nothing."""

CODE = "code"
"""Folder in a run folder with copies of the user's own modules that the run imported."""
DERIVED = "derived"
"""The key of resolved files that lists the values derived from others (experiment/derived.py)."""

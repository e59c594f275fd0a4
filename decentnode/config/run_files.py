"""Names that whoever writes a run's folder and whoever reads it have to agree on. Imports nothing."""

CODE = "code"
"""Folder in a run directory for the modules of the user's own that the run imported."""
DERIVED = "derived"
"""The key of resolved files that lists the values that follow from others (experiment/derived.py)."""

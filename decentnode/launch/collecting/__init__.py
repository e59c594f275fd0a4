"""Copies the parts of a run that its machines have into one folder."""

"""Checks before ranks train together: what is refused, and what must be the same on all ranks."""

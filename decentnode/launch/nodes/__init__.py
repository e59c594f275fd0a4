"""Runs nodes in their own processes, one or several per process, and admits newcomers, which are in no mapping."""

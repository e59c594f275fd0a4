"""Turns YAML text into typed Configs; every problem is reported with its location, all at once."""

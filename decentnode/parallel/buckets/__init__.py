"""Flat buckets of parameters: their snapshots, their mixing, and the compiled loops that do both in one pass."""

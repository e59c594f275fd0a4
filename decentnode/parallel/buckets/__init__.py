"""Flat buckets of parameters, and how they travel between ranks."""

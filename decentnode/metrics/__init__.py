"""Figures on disk: metrics.jsonl of every node, and the summary of a run."""

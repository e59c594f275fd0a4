"""Writes checkpoints, the whole state of a node, while training continues, and reads them back bit for bit."""

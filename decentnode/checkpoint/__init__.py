"""Checkpoints: the whole state of a node, written without holding up the training, and read back bit for bit."""

"""When the nodes of a run make checkpoints, what is in one, and how they go on from it together."""

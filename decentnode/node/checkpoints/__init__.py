"""When nodes make checkpoints, what a checkpoint contains, and how all nodes resume from the same one."""

"""Transports that choose a path for every edge: shared memory, torch.distributed or ZeroMQ."""

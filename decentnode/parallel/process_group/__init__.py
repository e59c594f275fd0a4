"""The default process group of torch.distributed: its collectives, what its ranks agree on, how they leave it."""

"""The default process group of torch.distributed: operations of all ranks, what they agree on, how they leave it."""

"""Payloads inside a clique of nodes over torch.distributed: gloo between CPUs, NCCL between GPUs."""

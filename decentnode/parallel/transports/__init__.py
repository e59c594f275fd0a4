"""The transports that exchange buckets between ranks: torch.distributed, shared memory and sockets."""

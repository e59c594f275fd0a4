"""How buckets travel between ranks: by operations of torch.distributed, through shared memory, over sockets."""

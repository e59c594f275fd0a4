"""Payloads between nodes of one host: publish buffers in shared memory or a GPU's memory, and doorbells."""

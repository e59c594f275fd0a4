"""Receiving: what has arrived of each source's payload, from the first chunk until it is mixed."""

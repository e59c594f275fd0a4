"""The ZeroMQ transport: reliable links between any machines, generations of members, means over a tree."""

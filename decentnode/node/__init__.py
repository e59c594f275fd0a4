"""The round loop of one node."""

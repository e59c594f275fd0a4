"""Runs whose nodes are all in one process: stepped, or computed together."""

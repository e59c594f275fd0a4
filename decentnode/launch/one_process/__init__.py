"""Runs all nodes in one process: stepped in turn, or computed together in a simulation."""

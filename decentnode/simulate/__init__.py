"""Engines that compute all nodes of a run in one process."""

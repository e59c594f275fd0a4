"""Engines that compute the local steps of all nodes in one process."""

"""Engines that compute the local steps, exchanges and evaluations of all nodes in one process."""

"""Simulation of a whole run on one machine: engines that compute all nodes, virtual time, simulated worlds, and the
planner."""

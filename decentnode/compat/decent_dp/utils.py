"""The names of Decent-DP's module `utils`."""

from decentnode.parallel.process_group import initialize_dist

__all__ = ["initialize_dist"]

"""decentralizepy's config files: read (config_file.py, keys.py) and translated into experiments (translate.py)."""

from decentnode.compat.decentralizepy.translate import CommandLine, Translation, translate

__all__ = ["CommandLine", "Translation", "translate"]

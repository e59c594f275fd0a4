"""The version of the package, in a file of its own so that modules below `__init__.py` can import it."""

__version__ = "0.1.0"

"""The version of this package, where its own files read it: its face (`__init__.py`) is above all of them."""

__version__ = "0.1.0"

"""decentnode: decentralized deep learning without a center."""

__version__ = "0.1.0"

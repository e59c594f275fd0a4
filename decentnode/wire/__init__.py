"""The protocol without I/O: messages, their bytes, and what a node may say when."""

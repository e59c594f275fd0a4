"""The sockets of a node, their thread, and who may speak to them."""

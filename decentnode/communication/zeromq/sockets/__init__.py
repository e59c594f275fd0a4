"""The sockets of a node, the thread that uses them, and the authentication of peers."""

"""The protocol of one node: the messages that it sends, and how it handles those that it receives. Without I/O, threads
or a clock: calls drive it."""

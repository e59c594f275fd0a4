"""From one command to running nodes: the fork server, the supervisor, the run directory.

The supervisor's process never imports torch: it reads no config itself but asks a child of the fork server.
"""

"""What belongs to one generation of members, where the training thread and the sockets' thread meet."""

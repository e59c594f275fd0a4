"""The parts of a transport that belong to one generation of members, shared by the training and the I/O thread."""

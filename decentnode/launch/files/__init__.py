"""The files of a run: its folder, what nodes and supervisor write there, and users' requests to it."""

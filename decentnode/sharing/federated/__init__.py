"""Rules of a server and its clients: federated learning. `rounds.py` is what all of them have in common."""

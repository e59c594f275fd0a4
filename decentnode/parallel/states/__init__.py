"""The contents of a wrapper's checkpoints, and how a state of another run is loaded."""

"""What checkpoints have of a wrapper, and how a state of another run is loaded."""

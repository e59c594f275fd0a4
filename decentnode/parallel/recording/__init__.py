"""What a script that records its training as a run has beside the wrapper."""

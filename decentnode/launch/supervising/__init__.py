"""The supervisor's decisions: which processes a machine starts, how long it waits, what a loss does."""

"""What is read of the folders of runs: curves, what single numbers tell of them, the state of a run that goes on."""

"""What a node measures: evaluations and their progress over the run, totals over rounds, and traces."""

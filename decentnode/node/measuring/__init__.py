"""What a node measures: evaluations and their course, totals, and when it did what."""

"""Pictures of runs, graphs, data shares, plans and virtual time."""

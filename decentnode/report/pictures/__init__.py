"""Pictures of runs, graphs, shares of data, plans and virtual time."""

"""Virtual time: computes when every node begins and ends each round, from given compute times and links. Does not use
torch."""

"""Virtual time: when every node begins and ends each round, in a world of given compute times and links. No torch."""

"""What a node does as the members of its run change."""

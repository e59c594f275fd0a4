"""What other packages' users bring along, in this package's terms."""

"""A step of the wrapper: noticed at the end of a backward pass, and taken bucket by bucket."""

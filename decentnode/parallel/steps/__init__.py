"""A step of the wrapper: its trigger, the end of a backward pass, and what it does, bucket by bucket."""

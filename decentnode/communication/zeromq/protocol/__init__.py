"""What a node says to others, and what it makes of what they say: driven by calls, without I/O, threads or a clock."""

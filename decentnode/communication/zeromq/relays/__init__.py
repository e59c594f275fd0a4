"""How nodes behind NAT are reached: connections through relays."""

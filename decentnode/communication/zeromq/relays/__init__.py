"""Connections through relays, by which nodes behind NAT are reached."""

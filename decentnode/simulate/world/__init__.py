"""Whole nodes on virtual time in one thread: the real session, links, inbox, membership, schedule and node code, driven
by one heap of events over simulated connections. A seed replays a run exactly."""

"""Deterministic simulation of whole nodes on virtual time, in one thread: the real session, links, inbox, membership,
schedule and node code are driven by one event queue over simulated connections. A seed replays a run exactly."""

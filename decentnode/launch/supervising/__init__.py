"""Makes the supervisor's decisions: which processes a machine starts, how long it waits for them, and what happens when
one of them dies."""

"""Schedules in which no node waits for another one's round: nodes meet in mailboxes (docs/explanation/round.rst)."""

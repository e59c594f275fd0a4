"""The asynchronous schedules, in which no node waits for another one's round: payloads are exchanged through mailboxes
(docs/explanation/round.rst)."""

"""Reports a run to its user and to trackers while it is in progress, and its outcome: exit code, first failure,
summary."""

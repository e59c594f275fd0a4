"""What a run tells whoever watches it, and what remains of it: exit code, first failure, summary."""

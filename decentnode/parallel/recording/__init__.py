"""Recording a script's training as a run: its records, checkpoints and ranks."""

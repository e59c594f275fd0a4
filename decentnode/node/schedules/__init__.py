"""The schedules: in which order a round makes its local steps, exchanges payloads and mixes."""

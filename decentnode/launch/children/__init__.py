"""How child processes come to be, and the pipes and messages between them and the supervisor."""

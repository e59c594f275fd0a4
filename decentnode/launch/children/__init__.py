"""The fork server that starts child processes, and the pipes and messages between them and the supervisor."""

"""What the machines of a run have of it, brought into one folder."""

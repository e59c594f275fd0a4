"""What is refused before ranks train together, and what all of them must have alike."""

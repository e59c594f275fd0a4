"""What programs and notebooks call."""

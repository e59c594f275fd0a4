"""What a node does when the membership of its run changes."""

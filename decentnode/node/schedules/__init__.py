"""The order of local steps, exchanges and mixing in a round."""

"""Reads run folders: curves, figures derived from them, groups of repeats, and the progress of a running experiment."""

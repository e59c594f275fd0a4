"""The methods of `CommOptimizer`: how ranks exchange parameters beside a local optimizer."""

"""The methods of `CommOptimizer`: what ranks do together beside a local optimizer."""

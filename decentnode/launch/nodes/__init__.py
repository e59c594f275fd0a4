"""Nodes in processes of their own, one or several in each, and how nodes of no mapping come in."""

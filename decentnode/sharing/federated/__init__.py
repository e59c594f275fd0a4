"""Sharing rules for servers and their clients (federated learning). `rounds.py` contains their common base class."""

"""Sweeps: an experiment run with many values of some of its keys, and what they make of it.

`space` has the values, `samplers` the order, `point` one combination, `conduct` runs them, `results` compares them.
"""

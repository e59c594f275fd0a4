"""Sweeps: one experiment run with many values of some of its keys, and the comparison of these runs.

`space` parses the values, `samplers` chooses the order, `point` prepares one combination, `conduct` runs the points and
`results` compares them.
"""

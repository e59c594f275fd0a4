"""Compatibility: lets scripts and config files of other packages run with this one."""

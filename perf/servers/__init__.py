"""Servers under test: ours and the baselines, started by one interface."""

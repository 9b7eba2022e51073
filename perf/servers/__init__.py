"""Servers under test: one way to start ours or a baseline, with a `Target` for the load generator."""

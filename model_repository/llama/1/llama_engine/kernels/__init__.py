"""Kernels of a decode step and their references; `selection` verifies and chooses them when the model loads."""

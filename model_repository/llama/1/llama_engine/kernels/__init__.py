"""Kernels: each with its reference; which are used is chosen and verified at load."""

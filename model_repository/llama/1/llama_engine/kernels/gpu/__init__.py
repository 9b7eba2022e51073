"""Kernels of a decode step in the Triton language and their references; `gpu_kernels` verifies and chooses them."""

"""Kernels of the model's layers, verified when the model loads: `cpu` in C++, `gpu` in the Triton language."""

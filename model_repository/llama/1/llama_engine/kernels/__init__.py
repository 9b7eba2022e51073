"""Kernels of the model's layers: `cpu` in C++, `gpu` in libraries; chosen and verified when the model loads."""

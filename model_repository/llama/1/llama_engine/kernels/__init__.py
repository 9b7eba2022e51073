"""Kernels of the model's layers: `cpu` in C++, `gpu` from libraries; selected and verified when the model loads."""

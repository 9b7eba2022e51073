"""A GPU's product and attention, by the kernels of bitsandbytes and PyTorch."""

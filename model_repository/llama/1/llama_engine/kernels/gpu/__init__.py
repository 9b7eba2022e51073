"""INT8 product and attention on a GPU, with kernels of bitsandbytes and PyTorch."""

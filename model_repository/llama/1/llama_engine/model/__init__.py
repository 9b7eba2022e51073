"""The model: loading, forward passes, KV cache, INT8 linear layers, memory plan."""

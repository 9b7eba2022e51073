"""The model: loading, forward passes, KV cache, attention, INT8 linear layers, memory plan."""

"""The model: how it is loaded, the forward passes, the KV cache."""

"""Sampling: sampler, logits processors, counter-based random numbers."""

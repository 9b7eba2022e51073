"""Sampling: sampler, filters, the draw and its faster form on a CPU, a sequence's bias and masks, log probabilities."""

"""Sampling: sampler, filters and their faster form on a CPU, a sequence's bias and masks, log probabilities."""

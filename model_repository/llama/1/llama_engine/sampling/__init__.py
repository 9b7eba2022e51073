"""Sampling: sampler, logits processors and their faster form on a CPU, guides, bias and masks of single sequences, log
probabilities, counter-based random numbers.
"""

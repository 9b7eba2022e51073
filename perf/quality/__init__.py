"""Quality loss of INT8: perplexity, KL divergence and agreement with the unquantized weights, on a text."""

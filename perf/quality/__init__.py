"""What INT8 costs in quality: perplexity, KL divergence and agreement with the unquantized weights, on a text.

Knows nothing about servers and time. Each checkpoint is loaded by the server's own loader, so what is measured is what
is served.
"""

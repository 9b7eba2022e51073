"""Quantize a checkpoint once, so that servers start from the result instead of doing it again at every start.

Runs where a server would: in the checkout (`make prepare`) and in the image, as an init container. Uses the server's
own loading for the quantization and for the verification, so that there is one way to quantize and not two.
"""

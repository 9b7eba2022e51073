"""4- and 8-bit integers packed into 32-bit words, lowest bits first, as GPTQ, AWQ and compressed-tensors save them."""

from __future__ import annotations

import torch

BITS = (4, 8)
"""Numbers of bits that `unpack` reads."""


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the integers of int32 words [rows, words] less 2^(bits - 1), int8, [rows, words · 32 / bits]."""
    # A copy, because contiguous() keeps other strides of a dimension of size 1.
    octets = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if bits == 8:
        return octets.bitwise_xor(128).view(torch.int8)
    # Each byte's two integers in two bytes, the lower ones first.
    pairs = octets.to(torch.int16)
    pairs |= pairs << 4
    pairs &= 0x0F0F
    return pairs.view(torch.int8).sub_(8)


def packed_length(count: int, bits: int) -> int:
    """Return the number of words of `count` integers."""
    return -(-count * bits // 32)

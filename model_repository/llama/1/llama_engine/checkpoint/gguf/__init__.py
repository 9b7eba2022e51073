"""GGUF, llama.cpp's checkpoint format: config, tokenizer and weights of a model in one file or in numbered shards.

| tensors | served as |
|---|---|
| Q8_0, Q4_0, Q4_1, Q4_K | as saved: groups of 32 |
| F32, F16, BF16, F64 | floats; quantized to INT8 per channel where the model is |
| the other types that the package gguf dequantizes, such as Q6_K | 8-bit groups of 32, rounded once more |

That rounding costs a KL divergence of 5e-5 (Q4_0 and Q4_K_M, for the few tensors in Q6_K) to 2e-4 (all in Q6_K) on the
tests' checkpoint, whose types themselves cost 3e-2 and 3e-3.
"""

from __future__ import annotations

"""How checkpoints save quantized linear layers, one module a format, and which one a checkpoint has.

| format | weights | served as |
|---|---|---|
| `bitsandbytes_int8` | 8 bits, rows | as saved |
| `compressed_tensors` | 8 bits, rows or tensors; 4 and 8 bits, groups; FP8 | as saved; FP8 as requantized INT8 rows |
| `gptq` | 4 and 8 bits, groups, in any order of the inputs | as saved |
| `awq` | 4 bits, groups | as saved |
| `fp8` | FP8, tensors, rows or blocks | requantized to INT8 rows |
| `gguf_blocks` | 8 or 4 bits, groups of 32 | as saved; other types are rounded to 8-bit groups of 32 |

Groups that don't have a multiple of 32 columns are requantized to INT8 rows.
"""

from __future__ import annotations

"""How checkpoints save quantized linear layers, one module a format, and which one a checkpoint has.

| format | weights | served as |
|---|---|---|
| `bitsandbytes_int8` | 8 bits per channel | as saved |
| `compressed_tensors` | 8 bits per channel or tensor; 4 and 8 bits, groups; FP8 | as saved; FP8: per channel |
| `gptq` | 4 and 8 bits, groups, in any order of the inputs | as saved |
| `awq` | 4 bits, groups | as saved |
| `fp8` | FP8 per tensor, channel or block | requantized to INT8 per channel |
| `gguf` | 8 or 4 bits, groups of 32 | as saved; other types are rounded to 8-bit groups of 32 |

Groups that don't have a multiple of 32 columns are requantized to INT8 per channel.
"""

from __future__ import annotations

"""How checkpoints save quantized linear layers, one module a format, and which one a checkpoint has.

A format's class implements `linear_format.LinearFormat`, and `detection.FORMATS` has its `quant_method`. Layers are
returned in the integers and scales that are saved where the kernels have products for them: 8 bits per channel, or 4
and 8 bits in groups of a multiple of 32 columns. Others are requantized to INT8 per channel. docs/checkpoints.md has
the formats and what each is served as.
"""

from __future__ import annotations

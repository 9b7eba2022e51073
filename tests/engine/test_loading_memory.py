"""The memory that loading takes, in a process of its own: freed memory of other tests would be used first."""

from pathlib import Path

import pytest
from engine.checkpoints import save_small
from engine.engines import needs_compiled_kernels
from llama_engine.text.tokenizer import Tokenizer
from python_process import run_python

LAYERS, HIDDEN, INTERMEDIATE = 16, 512, 2048

LAYER_BYTES = 3 * HIDDEN**2 + 3 * HIDDEN * INTERMEDIATE
"""Of a layer's weights in INT8: queries and output, half as many keys and values, and the MLP."""

CONSTANT = 48 << 20
"""Blocks that are being read, one for each thread, and the products that verify the kernels."""

PROGRAM = """
import sys
from pathlib import Path
from engine.engines import load

def status(key):
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[key].split()[0]) * 1024

small, wide = sys.argv[1:]
# Imports everything.
load("int8", model=small)
# Resets the peak.
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
checkpoint = load("int8", model=wide)
print(status("VmHWM") - before, checkpoint.info.weight_bytes, type(checkpoint.model).__name__)
"""


@pytest.mark.long
def test_loading_for_the_compiled_kernels_holds_two_more_layers(tmp_path: Path, tokenizer: Tokenizer) -> None:
    needs_compiled_kernels()
    small = save_small(tmp_path / "small", tokenizer)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS}
    wide = save_small(tmp_path / "wide", tokenizer, **sizes, num_attention_heads=8, num_key_value_heads=4)
    peak, weights, loaded = run_python(PROGRAM, str(small), str(wide)).stdout.split()
    assert loaded == "PackedLlama"
    assert int(weights) > LAYERS * LAYER_BYTES
    assert int(weights) < int(peak) < int(weights) + 2 * LAYER_BYTES + CONSTANT
    assert 2 * LAYER_BYTES + CONSTANT < LAYERS * LAYER_BYTES, "the bound allows a second copy"

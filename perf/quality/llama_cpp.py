"""Perplexity of a GGUF file beside llama.cpp's program `llama-perplexity`, over the same tokens.

That program cuts the text into windows of CONTEXT tokens, without the rest, puts a BOS in the place of each window's
first token if the file says that prompts begin with one, and scores the second half of each window. With quantized
weights it rounds activations to 8 bits, which alone changes a perplexity by half a percent: with the same weights as
floats it doesn't.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import torch
from llama_engine.model.loader import LoadedModel

from perf.command import CORES
from perf.quality.divergence import Forward, perplexity
from perf.quality.text import Texts

CONTEXT = 512


def by_llama_cpp(program: Path, model: Path, text: Path) -> float:
    """Return the perplexity that the program prints. Raises OSError, or ValueError if it prints none."""
    command = [str(program), "--model", str(model), "--file", str(text), "--no-escape"]
    command += ["--ctx-size", str(CONTEXT), "--threads", str(CORES)]
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if (found := re.search(r"Final estimate: PPL = ([\d.]+)", run.stdout)) is None:
        *_, last = ["nothing", *run.stdout.strip().splitlines()]
        raise ValueError(f"{program.name} printed no perplexity, but {last}")
    return float(found[1])


def as_floats(model: Path, target: Path) -> Path:
    """Write a GGUF file again with its weights dequantized to FP32; return the new file."""
    # Imported here: only these files need it.
    import gguf

    reader = gguf.GGUFReader(model)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        # The writer has a header of its own, which the reader shows as fields.
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            # Of an array, its type and its elements'.
            writer.add_key_value(field.name, field.contents(), field.types[0], field.types[-1])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def windows(text: str, loaded: LoadedModel) -> Texts:
    """Return the text's windows. Raises ValueError if there are less than two, which the program refuses, too."""
    # A file's last newline is no part of the program's prompt.
    tokens = loaded.tokenizer.encode(text.removesuffix("\n"))
    if len(tokens) < 2 * CONTEXT:
        raise ValueError(f"the text has {len(tokens)} tokens; {2 * CONTEXT} are needed")
    begin = tokens[:1] if tokens[0] == loaded.tokenizer.pretrained.bos_token_id else ()
    starts = range(0, len(tokens) - CONTEXT + 1, CONTEXT)
    return [[*begin, *tokens[start + len(begin) : start + CONTEXT]] for start in starts]


@torch.inference_mode()
def by_engine(forward: Forward, texts: Texts) -> float:
    """Return the perplexity of the windows' second halves, as the engine computes their logits."""
    losses = []
    for text in texts:
        logits = forward.logits(forward.hidden(text)[CONTEXT // 2 : -1]).double()
        targets = torch.tensor(text[CONTEXT // 2 + 1 :], device=logits.device)
        losses.append(torch.nn.functional.cross_entropy(logits, targets, reduction="none"))
    return perplexity(torch.cat(losses))

"""Measure a trained checkpoint: `python -m models.train_pydoc_llama.evaluate models/pydoc-llama`.

Held-out perplexity in float32 and in 8 bits, and what the model writes after a fixed list of prompts; the figures go
to evaluation.json in the checkpoint's folder. Needs the Python version that the checkpoint was trained with.
"""

import argparse
import copy
import json
import logging
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import BitsAndBytesConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from models.train_pydoc_llama.architecture import CONTEXT, ROPE, TRAINED_CONTEXT
from models.train_pydoc_llama.batches import held_out_rows, packed_rows
from models.train_pydoc_llama.corpus import build_corpus
from models.train_pydoc_llama.perplexity import perplexity, perplexity_by_position
from models.train_pydoc_llama.tokenizer import load_tokenizer

# Chosen before the model had written anything; every answer is shown in the card, good or bad.
PROMPTS = (
    "Return a list of",
    "The with statement is used to",
    "This module provides",
    "Raise ValueError if",
    "A class is",
    "Open the file and",
    "The function returns",
    "os.path.join(path, *paths)\n\n",
)
QUESTIONS = ("What does shutil.copytree do?", "What is the json module?", "Explain exceptions in Python.")
SAMPLE_TOKENS = 60
SEED = 1
# Float32, and INT8 with and without bitsandbytes' outlier columns.
THRESHOLDS = {"fp32": None, "int8, threshold 6.0": 6.0, "int8, threshold 0.0": 0.0}
# Perplexity by position in the context, with RoPE as it was in training and as it is served.
EDGES = (0, TRAINED_CONTEXT, 2 * TRAINED_CONTEXT, CONTEXT)
POSITIONS = [f"{first:,} to {end - 1:,}" for first, end in pairwise(EDGES)]
ORDERS = 4
ROPES = {"as trained": {"rope_type": "default", "rope_theta": ROPE["rope_theta"]}, "scaled": ROPE}


def main() -> None:
    """Measure and write evaluation.json."""
    parser = argparse.ArgumentParser(prog="python -m models.train_pydoc_llama.evaluate", description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    folder = parser.parse_args().checkpoint
    # At every 8-bit product bitsandbytes warns that it casts to float16 inside: known, and thousands of lines.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    tokenizer = load_tokenizer(folder)
    corpus = build_corpus()
    trained_on = json.loads((folder / "training.json").read_text(encoding="utf-8"))["data"]["sha256"]
    if corpus.describe()["sha256"] != trained_on:
        raise SystemExit(f"this Python's text is not what {folder} was trained on: the held-out split would not hold")
    rows = held_out_rows(corpus.held_out, tokenizer, TRAINED_CONTEXT)
    record: dict[str, object] = {"held_out_tokens": sum(len(row) - 1 for row in rows)}
    figures: dict[str, float] = {}
    for name, threshold in tqdm(THRESHOLDS.items(), desc="perplexity", unit="precision"):
        model = load(folder, threshold)
        figures[name] = round(perplexity(model, rows, tokenizer.pad_token_id), 3)
        if threshold is None:
            record["samples"] = samples(model, tokenizer)
        elif threshold:
            record["int8_samples"] = samples(model, tokenizer)
    record["perplexity"] = figures
    packed = packed_rows(corpus.held_out, tokenizer, CONTEXT, ORDERS)
    record["perplexity_by_position"] = {
        name: dict(zip(POSITIONS, _by_position(folder, rope, packed), strict=True)) for name, rope in ROPES.items()
    }
    (folder / "evaluation.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(json.dumps(figures))


def _by_position(folder: Path, rope: Mapping[str, object], rows: list[list[int]]) -> list[float]:
    """Return the perplexities of POSITIONS in float32, with these parameters of RoPE in place of the checkpoint's."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, rope_parameters=dict(rope))
    return [round(value, 2) for value in perplexity_by_position(model, rows, EDGES)]


def load(folder: Path, threshold: float | None) -> LlamaForCausalLM:
    """Load the checkpoint on the CPU, in INT8 with bitsandbytes' outlier threshold; in float32 without one."""
    int8 = None if threshold is None else BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=threshold)
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=int8, device_map=None if int8 is None else "cpu"
    )
    model.train(False)
    return model


def samples(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> list[dict[str, str]]:
    """Complete each prompt greedily, and once more with the checkpoint's generation config."""
    chats = [
        str(tokenizer.apply_chat_template([{"role": "user", "content": question}], tokenize=False))
        for question in QUESTIONS
    ]
    shown: list[dict[str, str]] = []
    for prompt in tqdm((*PROMPTS, *chats), desc="samples", unit="prompt"):
        # The chat template writes its own <s>.
        inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=prompt not in chats)
        entry = {"prompt": prompt}
        for style, sampling in (("greedy", False), ("sampled", True)):
            torch.manual_seed(SEED)
            config = copy.deepcopy(model.generation_config)
            config.max_new_tokens, config.do_sample = SAMPLE_TOKENS, sampling
            if not sampling:
                config.temperature = config.top_p = None  # the repetition penalty stays
            output = model.generate(  # type: ignore[misc]
                inputs["input_ids"], attention_mask=inputs["attention_mask"], generation_config=config
            )
            entry[style] = str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
        shown.append(entry)
    return shown


if __name__ == "__main__":
    main()

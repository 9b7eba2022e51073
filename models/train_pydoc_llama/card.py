"""Write the model card: `python -m models.train_pydoc_llama.card models/pydoc-llama`.

Every figure comes from training.json and evaluation.json in the checkpoint's folder.
It writes loss.svg beside README.md.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from models.train_pydoc_llama.curve import curve

TABLE_ROWS = 12
KINDS = {
    "function": "docstrings of functions and methods",
    "class": "docstrings of classes",
    "module": "docstrings of modules",
    "topic": "the language reference in `pydoc_data.topics`",
    "comment": "comment blocks of three lines or more, prose only",
    "page": "IDLE's help page",
}


def main() -> None:
    """Read the two records, write the card."""
    parser = argparse.ArgumentParser(prog="python -m models.train_pydoc_llama.card", description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    folder = parser.parse_args().checkpoint
    records = {
        name: json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("config", "generation_config", "training", "evaluation")
    }
    size = (folder / "model.safetensors").stat().st_size
    (folder / "loss.svg").write_text(curve(records["training"]["log"]), encoding="utf-8")
    (folder / "README.md").write_text(card(size=size, **records), encoding="utf-8")


def card(
    config: dict[str, Any],
    generation_config: dict[str, Any],
    training: dict[str, Any],
    evaluation: dict[str, Any],
    size: int,
) -> str:
    """The card's text; `size` is the weights' file in bytes."""
    sections = (
        _head(config, generation_config, training, size),
        _quality(evaluation),
        _samples(evaluation),
        _data(training),
        _training(training),
        _limits(evaluation),
    )
    return "\n\n".join(sections) + "\n"


def _head(config: dict[str, Any], generation: dict[str, Any], training: dict[str, Any], size: int) -> str:
    return f"""---
language: en
library_name: transformers
pipeline_tag: text-generation
license: psf-2.0
---

# pydoc-llama

A Llama of {training["parameters"] / 1e6:.1f} million parameters, trained from scratch on the text that ships with
CPython {training["data"]["python"]}. It is the checkpoint that this project serves when no other is named: small enough
for a repository and two CPU cores, and a real `LlamaForCausalLM` in every other respect.

| | |
|---|---|
| architecture | `{config["architectures"][0]}`, {config["num_hidden_layers"]} layers, hidden {config["hidden_size"]}, \
{config["num_attention_heads"]} heads of {config["head_dim"]} with {config["num_key_value_heads"]} key-value heads, \
SwiGLU {config["intermediate_size"]}, tied embeddings |
| context | {config["max_position_embeddings"]} tokens |
| weights | float32 safetensors, {size / 1e6:.1f} MB |
| tokenizer | byte-level BPE, {training["vocabulary"]} tokens; any UTF-8 text comes back exactly; `<s>` comes first |
| chat template | Llama-2's `[INST]` form |
| generation defaults | sampling at temperature {generation["temperature"]}, top_p {generation["top_p"]}, \
repetition_penalty {generation["repetition_penalty"]} |

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("models/pydoc-llama")
model = AutoModelForCausalLM.from_pretrained("models/pydoc-llama")
inputs = tokenizer("Return a list of", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=40)[0], skip_special_tokens=True))
```"""


def _quality(evaluation: dict[str, Any]) -> str:
    rows = "\n".join(f"| {name} | {value:.2f} |" for name, value in evaluation["perplexity"].items())
    return f"""## Held-out perplexity

Per token, on {evaluation["held_out_tokens"]:,} tokens of documents that were not trained on (the text alone, each
document from its beginning, rows of at most 512 tokens). INT8 is bitsandbytes' `load_in_8bit` with that outlier
threshold, on the CPU.

| precision | perplexity |
|---|---:|
{rows}"""


def _samples(evaluation: dict[str, Any]) -> str:
    blocks = [
        f"```text\nprompt   {json.dumps(item['prompt'], ensure_ascii=False)}\n"
        f"greedy   {json.dumps(item['greedy'], ensure_ascii=False)}\n"
        f"sampled  {json.dumps(item['sampled'], ensure_ascii=False)}\n```"
        for item in evaluation["samples"]
    ]
    return "\n\n".join(
        (
            "## Samples",
            "All prompts of a list fixed before the model had written anything, nothing picked: up to 60 tokens\n"
            "greedily (the repetition penalty stays) and up to 60 drawn with the generation defaults and one seed.\n"
            "Float32; evaluation.json has the same in INT8.",
            *blocks,
        )
    )


def _data(training: dict[str, Any]) -> str:
    data = training["data"]
    kinds = sorted(data["characters_by_kind"].items(), key=lambda pair: -pair[1])
    rows = "\n".join(f"| {KINDS[kind]} | {characters:,} |" for kind, characters in kinds)
    return f"""## Data

Text of the CPython {data["python"]} installation that the training script runs on: nothing is downloaded. Docstrings of
Python sources are read from their syntax trees (test suites and third-party packages left out), those of compiled
modules from the modules. Prose is unwrapped, rulers are dropped, texts that differ only in case, digits or punctuation
appear once. Documents whose beginnings agree fall on the same side of the split.

| what | characters |
|---|---:|
{rows}

| side | documents | characters | tokens |
|---|---:|---:|---:|
| training | {data["documents"]["training"]:,} | {data["characters"]["training"]:,} | {data["tokens"]["training"]:,} |
| held out | {data["documents"]["held_out"]:,} | {data["characters"]["held_out"]:,} | {data["tokens"]["held_out"]:,} |

SHA-256 of the corpus: `{data["sha256"]}`.
Which compiled modules exist depends on the installation, and with them a few docstrings.

About one document in seven is drawn as a chat ("What does textwrap.wrap do?") in the template's form, the others with
or without their name in front.

Licence: the text is Python's own, under the PSF License Agreement (Copyright Python Software Foundation); some modules
of the standard library carry further notices, listed in CPython's `LICENSE` and its documentation."""


def _training(training: dict[str, Any]) -> str:
    plan, done, log = training["plan"], training["done"], training["log"]
    stride = max(1, len(log) // TABLE_ROWS)
    shown = [row for index, row in enumerate(log) if (len(log) - 1 - index) % stride == 0]
    rows = "\n".join(
        f"| {row['step']} | {row['tokens']:,} | {row['seconds'] / 60:.0f} | {row['loss']:.3f} "
        f"| {row['held_out_perplexity']:.1f} |"
        for row in shown
    )
    return f"""## Training

{done["step"]:,} steps of {plan["tokens_per_batch"]:,} tokens, {done["tokens"]:,} tokens in all
({done["tokens"] / training["data"]["tokens"]["training"]:.1f} times the training text),
in {done["seconds"] / 60:.0f} minutes on two CPU cores that had other work to do as well.
Muon for the hidden matrices (learning rate {plan["matrix_lr"]}), AdamW for the rest ({plan["other_lr"]}),
{plan["warmup"]} steps of warm-up, then flat, then straight down to zero.
Rows of {plan["short_row"]} tokens, {plan["long_row"]} from {plan["long_from"]:.0%} of the steps on.
Seed {plan["seed"]}.

![Loss over training steps](loss.svg)

| step | tokens | minutes | training loss | held-out perplexity (a sample) |
|---:|---:|---:|---:|---:|
{rows}

To make it again, from the repository's root (it shows its progress, and continues where it was after a stop):

```sh
python -m models.train_pydoc_llama --out models/pydoc-llama
python -m models.train_pydoc_llama.evaluate models/pydoc-llama
python -m models.train_pydoc_llama.card models/pydoc-llama
```"""


def _limits(evaluation: dict[str, Any]) -> str:
    return f"""## Limits

It writes text that looks like Python's documentation and is often wrong: it invents functions, parameters and
behaviour. Single sentences are mostly grammatical; over several it loses its thread. After a question it writes
something in the form of an answer, usually about another subject. It knows no other domain and no language but English.
At a perplexity of {evaluation["perplexity"]["fp32"]:.0f} it is made for demonstrations and tests of a server,
not for answers."""


if __name__ == "__main__":
    main()

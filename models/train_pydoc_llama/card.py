"""Write the model card: `python -m models.train_pydoc_llama.card models/pydoc-llama`.

card.md is its text. Every figure comes from training.json, evaluation.json and the configs in the checkpoint's folder.
Writes loss.svg beside README.md.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from models.train_pydoc_llama.curve import curve

TEXT = Path(__file__).with_name("card.md")
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
    """Read the records, write the card."""
    parser = argparse.ArgumentParser(prog="python -m models.train_pydoc_llama.card", description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    folder = parser.parse_args().checkpoint
    records = {
        name: json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("config", "generation_config", "training", "evaluation")
    }
    training, evaluation = records["training"], records["evaluation"]
    data, done, log = training["data"], training["done"], training["log"]
    by_position = evaluation["perplexity_by_position"]
    stride = max(1, len(log) // TABLE_ROWS)
    card = TEXT.read_text(encoding="utf-8").format(
        **records,
        data=data,
        plan=training["plan"],
        done=done,
        millions=training["parameters"] / 1e6,
        megabytes=(folder / "model.safetensors").stat().st_size / 1e6,
        epochs=done["tokens"] / data["tokens"]["training"],
        minutes=done["seconds"] / 60,
        perplexities="\n".join(f"| {name} | {value:.2f} |" for name, value in evaluation["perplexity"].items()),
        rope=records["config"]["rope_parameters"],
        positions="\n".join(
            f"| {position} | {value:.2f} | {by_position['scaled'][position]:.2f} |"
            for position, value in by_position["as trained"].items()
        ),
        samples="\n\n".join(map(_sample, evaluation["samples"])),
        kinds="\n".join(
            f"| {KINDS[kind]} | {characters:,} |"
            for kind, characters in sorted(data["characters_by_kind"].items(), key=lambda pair: -pair[1])
        ),
        log="\n".join(_log_row(row) for index, row in enumerate(log) if (len(log) - 1 - index) % stride == 0),
    )
    (folder / "loss.svg").write_text(curve(log), encoding="utf-8")
    (folder / "README.md").write_text(card, encoding="utf-8")


def _sample(item: dict[str, str]) -> str:
    lines = (f"{name:8} {json.dumps(item[name], ensure_ascii=False)}" for name in ("prompt", "greedy", "sampled"))
    return "\n".join(("```text", *lines, "```"))


def _log_row(row: dict[str, Any]) -> str:
    cells = (row["step"], f"{row['tokens']:,}", f"{row['seconds'] / 60:.0f}", f"{row['loss']:.3f}")
    return f"| {' | '.join(map(str, cells))} | {row['held_out_perplexity']:.1f} |"


if __name__ == "__main__":
    main()

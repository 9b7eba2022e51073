"""Train models/pydoc-llama: `python -m models.train_pydoc_llama --out models/pydoc-llama`, from the repository's root.

Stops cleanly on SIGTERM and on Ctrl-C, and continues where it was when it is started again.
"""

import argparse
import dataclasses
import json
import math
import signal
import time
from pathlib import Path
from types import FrameType

import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from models.train_pydoc_llama.architecture import CONTEXT, TRAINED_CONTEXT, extend_context, new_model
from models.train_pydoc_llama.batches import BatchSource, held_out_rows
from models.train_pydoc_llama.corpus import Corpus, build_corpus
from models.train_pydoc_llama.hyperparameters import Plan
from models.train_pydoc_llama.perplexity import perplexity
from models.train_pydoc_llama.publishing import publish
from models.train_pydoc_llama.tokenizer import load_tokenizer, train_tokenizer
from models.train_pydoc_llama.trainer import Trainer
from models.train_pydoc_llama.views import SYSTEM_TEXTS

SAVE_SECONDS = 180
HELD_OUT_ROWS_WHILE_TRAINING = 96


def main() -> None:
    """Read the text, learn the tokenizer, train from where the last run stopped, and write the checkpoint."""
    parser = argparse.ArgumentParser(prog="python -m models.train_pydoc_llama", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the checkpoint's folder")
    parser.add_argument("--work", type=Path, default=Path(".work/pydoc-llama"), help="where an unfinished run is kept")
    parser.add_argument("--steps", type=int, default=Plan.steps, help=f"optimizer steps (default {Plan.steps})")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the trainer has threads of its own
    plan = Plan(steps=options.steps)
    options.work.mkdir(parents=True, exist_ok=True)
    print("reading the text that ships with Python", flush=True)
    corpus = build_corpus()
    tokenizer = _prepare_tokenizer(corpus, options.work)
    torch.manual_seed(plan.seed)
    model = new_model(tokenizer)
    data = corpus.describe()
    facts: dict[str, object] = {
        "data": data | {"tokens": _token_counts(corpus, tokenizer)},
        "plan": dataclasses.asdict(plan),
        "parameters": model.num_parameters(),
        "vocabulary": len(tokenizer),
    }
    rows = held_out_rows(corpus.held_out, tokenizer, TRAINED_CONTEXT)
    sample = rows[:: max(1, len(rows) // HELD_OUT_ROWS_WHILE_TRAINING)]
    trainer = Trainer(model, BatchSource(corpus.training, tokenizer, plan.tokens_per_batch, plan.seed), plan)
    identity = json.dumps([data["sha256"], facts["plan"]], sort_keys=True)
    train(trainer, sample, tokenizer, options.work / "state.pt", identity)
    if trainer.step < plan.steps:
        print(f"stopped after step {trainer.step}; the same command continues", flush=True)
        return
    done = {"step": trainer.step, "tokens": trainer.tokens, "seconds": round(trainer.seconds)}
    extend_context(model.config)
    publish(model, tokenizer, options.out, facts | {"done": done, "log": trainer.log})
    print(f"done: {options.out}", flush=True)


def train(
    trainer: Trainer, held_out: list[list[int]], tokenizer: PreTrainedTokenizerFast, state_file: Path, identity: str
) -> None:
    """Train to the plan's last step, or until a signal stops it, and save the state.

    identity: of the data and the plan; a state with another one is refused.
    """
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)  # noqa: TID251 - unpickles tensors alone
        if state["identity"] != identity:
            raise SystemExit(f"{state_file} belongs to a run with other data or another plan: move it away first")
        trainer.load_state_dict(state)
        print(f"continuing after step {trainer.step}", flush=True)
    stop_requested, plan = _catch_signals(), trainer.plan
    saved = time.monotonic()
    started = saved - trainer.seconds
    with tqdm(total=plan.steps, initial=trainer.step, unit="step", mininterval=5) as bar:
        while trainer.step < plan.steps and not stop_requested:
            loss = trainer.train_step()
            trainer.seconds = time.monotonic() - started
            if not math.isfinite(loss):
                raise SystemExit(f"step {trainer.step}: the loss is {loss}; {state_file} is still good")
            if trainer.step % plan.evaluate_every == 0 or trainer.step == plan.steps:
                trainer.log.append(_evaluation(trainer, perplexity(trainer.model, held_out, tokenizer.pad_token_id)))
                bar.write(json.dumps(trainer.log[-1]))
            elif time.monotonic() - saved > SAVE_SECONDS:
                _save(trainer, state_file, identity)
                saved = time.monotonic()
            bar.set_postfix(loss=f"{loss:.3f}")
            bar.update()
    _save(trainer, state_file, identity)


def _save(trainer: Trainer, state_file: Path, identity: str) -> None:
    partial = state_file.with_suffix(".partial")
    torch.save(trainer.state_dict() | {"identity": identity}, partial)
    partial.replace(state_file)  # a kill in the middle leaves the previous state


def _evaluation(trainer: Trainer, held_out: float) -> dict[str, float]:
    """Return a row of the log; the loss is the mean since the last one."""
    losses, trainer.recent_losses = trainer.recent_losses, []
    return {
        "step": trainer.step,
        "tokens": trainer.tokens,
        "seconds": round(trainer.seconds),
        "loss": round(sum(losses) / len(losses), 4),
        "held_out_perplexity": round(held_out, 2),
    }


def _prepare_tokenizer(corpus: Corpus, work: Path) -> PreTrainedTokenizerFast:
    """Learn the tokenizer from the training side, and reload it from disk, as its users do."""
    texts = [f"{item.name}{item.signature}\n\n{item.text}" for item in corpus.training]
    texts += [f"[INST] <<SYS>>\n{system}\n<</SYS>>\n\nWhat does it do? [/INST] " for system in SYSTEM_TEXTS] * 50
    train_tokenizer(texts, CONTEXT).save_pretrained(work / "tokenizer")
    return load_tokenizer(work / "tokenizer")


def _token_counts(corpus: Corpus, tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    """Return the number of tokens of both sides, texts alone."""
    sides = {"training": corpus.training, "held_out": corpus.held_out}
    return {
        side: sum(map(len, tokenizer([item.text for item in documents], add_special_tokens=False)["input_ids"]))
        for side, documents in sides.items()
    }


def _catch_signals() -> list[int]:
    """Return a list that SIGTERM or SIGINT fills; a second signal ends the process."""
    received: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        received.append(number)
        signal.signal(number, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, remember)
    signal.signal(signal.SIGINT, remember)
    return received


if __name__ == "__main__":
    main()

"""A training run from the first step to the published checkpoint: what is prepared, saved, shown and when."""

import dataclasses
import json
import math
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from models.train_pydoc_llama.architecture import CONTEXT, new_model
from models.train_pydoc_llama.batches import BatchSource, held_out_rows
from models.train_pydoc_llama.corpus import Corpus, build_corpus
from models.train_pydoc_llama.perplexity import perplexity
from models.train_pydoc_llama.plan import Plan
from models.train_pydoc_llama.publishing import publish
from models.train_pydoc_llama.tokenizer import load_tokenizer, train_tokenizer
from models.train_pydoc_llama.trainer import Trainer
from models.train_pydoc_llama.views import SYSTEM_TEXTS

SAVE_SECONDS = 180
PUBLISH_SECONDS = 600
HELD_OUT_ROWS_WHILE_TRAINING = 96


@dataclass
class Run:
    """Everything one run holds; `work` keeps its state between restarts."""

    out: Path
    work: Path
    tokenizer: PreTrainedTokenizerFast
    trainer: Trainer
    held_out: list[list[int]]
    facts: dict[str, object]

    @classmethod
    def prepare(cls, out: Path, work: Path, plan: Plan) -> "Run":
        """Read the text, learn the tokenizer, make the model, and go to where the last run stopped."""
        print("reading the text that ships with Python", flush=True)
        work.mkdir(parents=True, exist_ok=True)
        corpus = build_corpus()
        corpus.write(work)
        tokenizer = _prepare_tokenizer(corpus, work)
        torch.manual_seed(plan.seed)
        model = new_model(tokenizer)
        facts: dict[str, object] = {
            "data": corpus.describe() | {"tokens": _token_counts(corpus, tokenizer)},
            "plan": dataclasses.asdict(plan),
            "parameters": model.num_parameters(),
            "vocabulary": len(tokenizer),
        }
        rows = held_out_rows(corpus.held_out, tokenizer, CONTEXT)
        sample = rows[:: max(1, len(rows) // HELD_OUT_ROWS_WHILE_TRAINING)]
        batches = BatchSource(corpus.training, tokenizer, plan.tokens_per_batch, plan.seed)
        run = cls(out, work, tokenizer, Trainer(model, batches, plan), sample, facts)
        run._resume(json.dumps([corpus.describe()["sha256"], facts["plan"]], sort_keys=True))
        return run

    def train(self) -> None:
        """Train to the plan's last step and publish, or save the state and return when the process is asked to stop."""
        stop_asked = _catch_signals()
        trainer, plan = self.trainer, self.trainer.plan
        saved = published = time.monotonic()
        started = time.monotonic() - trainer.seconds
        with tqdm(total=plan.steps, initial=trainer.step, unit="step", mininterval=5) as bar:
            while trainer.step < plan.steps and not stop_asked:
                loss = trainer.train_step()
                trainer.seconds = time.monotonic() - started
                if not math.isfinite(loss):
                    raise SystemExit(f"step {trainer.step}: the loss is {loss}; {self._state_file} is still good")
                if trainer.step % plan.evaluate_every == 0 or trainer.step == plan.steps:
                    bar.write(json.dumps(self._evaluate()))
                elif time.monotonic() - saved > SAVE_SECONDS:
                    self._save()
                    saved = time.monotonic()
                last = trainer.log[-1]["held_out_perplexity"] if trainer.log else math.nan
                bar.set_postfix(loss=f"{loss:.3f}", held_out_ppl=f"{last:.1f}")
                bar.update()
                if time.monotonic() - published > PUBLISH_SECONDS:
                    self._publish()
                    published = time.monotonic()
        self._save()
        if trainer.step < plan.steps:
            print(f"stopped after step {trainer.step}; the same command continues", flush=True)
        else:
            self._publish()
            print(f"done: {self.out}", flush=True)

    @property
    def _state_file(self) -> Path:
        return self.work / "state.pt"

    def _resume(self, identity: str) -> None:
        self.identity = identity
        if not self._state_file.exists():
            self._publish()
            return
        state = torch.load(self._state_file, weights_only=True)
        if state["identity"] != identity:
            raise SystemExit(f"{self._state_file} belongs to a run with other data or another plan: move it away first")
        self.trainer.load_state_dict(state)
        print(f"continuing after step {self.trainer.step}", flush=True)

    def _save(self) -> None:
        partial = self._state_file.with_suffix(".partial")
        torch.save(self.trainer.state_dict() | {"identity": self.identity}, partial)
        partial.replace(self._state_file)  # a kill in the middle leaves the previous state

    def _evaluate(self) -> dict[str, float]:
        losses = self.trainer.recent_losses
        held_out = perplexity(self.trainer.model, self.held_out, self.tokenizer.pad_token_id)
        row = {
            "step": self.trainer.step,
            "tokens": self.trainer.tokens,
            "seconds": round(self.trainer.seconds),
            "loss": round(sum(losses) / len(losses), 4),
            "held_out_perplexity": round(held_out, 2),
        }
        self.trainer.log.append(row)
        losses.clear()
        return row

    def _publish(self) -> None:
        trainer = self.trainer
        done = {"step": trainer.step, "tokens": trainer.tokens, "seconds": round(trainer.seconds)}
        publish(trainer.model, self.tokenizer, self.out, self.facts | {"done": done, "log": trainer.log})


def _prepare_tokenizer(corpus: Corpus, work: Path) -> PreTrainedTokenizerFast:
    """Learned from the training side, and reloaded from disk so that training sees what users will load."""
    texts = [f"{item.name}{item.signature}\n\n{item.text}" for item in corpus.training]
    texts += [f"[INST] <<SYS>>\n{system}\n<</SYS>>\n\nWhat does it do? [/INST] " for system in SYSTEM_TEXTS] * 50
    train_tokenizer(texts, CONTEXT).save_pretrained(work / "tokenizer")
    return load_tokenizer(work / "tokenizer")


def _token_counts(corpus: Corpus, tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    """The size of both sides in tokens, texts alone."""
    sides = {"training": corpus.training, "held_out": corpus.held_out}
    return {
        side: sum(map(len, tokenizer([item.text for item in documents], add_special_tokens=False)["input_ids"]))
        for side, documents in sides.items()
    }


def _catch_signals() -> list[int]:
    """The list is filled when the process is asked to stop; a second signal kills as usual."""
    received: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        received.append(number)
        signal.signal(number, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, remember)
    signal.signal(signal.SIGINT, remember)
    return received

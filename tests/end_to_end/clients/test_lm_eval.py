"""lm-evaluation-harness' `local-completions`: it scores continuations by the prompt's log probabilities (echo)."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from end_to_end.clients.environments import FOLDER, installed, run
from end_to_end.servers import EMBEDDED
from transformers import AutoModelForCausalLM, AutoTokenizer

TASK = FOLDER / "lm_eval_task"


def test_lm_eval_scores_continuations_as_transformers_does(base_url: str, tmp_path: Path) -> None:
    task = shutil.copytree(TASK, tmp_path / "task")
    # Without the name of a tokenizer: it asks the endpoint, at /tokenizer_info and /tokenize.
    model = f"base_url={base_url}/completions,model=pydoc-llama"
    scoring = ["run", "--model", "local-completions", "--model_args", model]
    scoring += ["--tasks", "two_lines", "--batch_size", "3"]
    out = tmp_path / "out"
    program = installed("lm_eval") / "bin" / "lm_eval"
    files: list[str | Path] = ["--include_path", task, "--log_samples", "--output_path", out]
    ended = run([program, *scoring, *files], base_url, tmp_path, cwd=task)
    assert "Using remote tokenizer backend" in ended.stderr
    (samples,) = out.glob("*/samples_two_lines_*.jsonl")
    answers = [json.loads(line) for line in samples.read_text().splitlines()]
    lines = [json.loads(line) for line in (TASK / "two_lines.jsonl").read_text().splitlines()]
    assert [answer["acc"] for answer in sorted(answers, key=lambda answer: answer["doc_id"])] == [1.0, 1.0]
    for answer, line in zip(sorted(answers, key=lambda answer: answer["doc_id"]), lines, strict=True):
        scores = [float(response[0][0]) for response in answer["resps"]]
        # In 8 bits, so not exactly.
        expected = [_score(line["question"], choice) for choice in line["choices"]]
        assert scores == pytest.approx(expected, rel=0.03, abs=0.2)


def _score(prompt: str, continuation: str) -> float:
    """Return a continuation's log probability in 32 bits; the prompt without BOS, as lm_eval sends it."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)
    context = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    tokens = tokenizer(prompt + continuation, add_special_tokens=False)["input_ids"]
    with torch.inference_mode():
        logprobs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    pairs = list(enumerate(pairwise(tokens)))[len(context) - 1 :]
    return sum(float(logprobs[position, token]) for position, (_, token) in pairs)

"""Libraries that speak OpenAI's or Anthropic's protocol, each in its own environment, as its users install it."""

from __future__ import annotations

import json
import os
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from end_to_end.clients.environments import FOLDER, installed, run
from end_to_end.servers import EMBEDDED
from transformers import AutoModelForCausalLM, AutoTokenizer

# test_dynamo.py runs Dynamo's.
PYTHON_CLIENTS = sorted({path.name.removesuffix("_checks.py") for path in FOLDER.glob("*_checks.py")} - {"dynamo"})
JAVASCRIPT_LIBRARIES = sorted(path.name.removesuffix("_checks.mjs") for path in FOLDER.glob("node/*_checks.mjs"))


@pytest.mark.parametrize("client", PYTHON_CLIENTS)
def test_a_library_in_python_passes_its_checks(client: str, base_url: str, tmp_path: Path) -> None:
    # The checks are tests for the pytest of that environment, which has none of this project's packages.
    checks = FOLDER / f"{client}_checks.py"
    options = ["-c", os.devnull, f"--rootdir={FOLDER}", "--noconftest", "-p", "no:cacheprovider", "--verbose"]
    ended = run([installed(client) / "bin" / "python", "-m", "pytest", *options, checks], base_url, tmp_path)
    assert " passed" in ended.stdout
    assert " skipped" not in ended.stdout


@pytest.mark.parametrize("library", JAVASCRIPT_LIBRARIES)
def test_a_library_in_javascript_passes_its_checks(library: str, base_url: str, tmp_path: Path) -> None:
    # Node looks for packages in the folders above a script alone.
    (tmp_path / "node_modules").symlink_to(installed("node") / "node_modules")
    checks = shutil.copy(FOLDER / "node" / f"{library}_checks.mjs", tmp_path)
    ended = run(["node", "--test", "--test-reporter=tap", checks], base_url, tmp_path)
    assert "\n# pass 0\n" not in ended.stdout
    assert "\n# skipped 0\n" in ended.stdout


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

"""Nothing that is served, deployed or installed unpickles a file or runs code of a checkpoint."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from contract.code_blocks import ROOT

FOLDERS = ("model_repository", "client", "deploy")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))

# Loading a file with these runs code in it.
_RUNS_WHAT_IT_READS = r"(pickle|cPickle|_pickle|dill|cloudpickle|joblib|marshal|shelve)\b"
_OFFENCES = {
    "imports a module that runs what it reads": rf"from {_RUNS_WHAT_IT_READS}|import .*\b{_RUNS_WHAT_IT_READS}",
    "runs what it reads": r"(eval|exec|compile|__import__|torch\.load)\(",
    "may run code of a checkpoint": r"(?s).*\btrust_remote_code(?!=False[,)])",
    "may load a pickle": r"(AutoModel\w*|\w+Model|\w+For[A-Z]\w+)\.from_pretrained\((?s:(?!.*use_safetensors=True))",
}


def _offences(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Call | ast.Dict):
            text = ast.unparse(node)
            yield from (f"{text} {offence}" for offence, pattern in _OFFENCES.items() if re.match(pattern, text))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_source_does_not_run_what_it_reads(path: Path) -> None:
    assert list(_offences(path.read_text())) == []


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ("import os, pickle", True),
        ("from joblib import load", True),
        ("AutoConfig.from_pretrained(name, trust_remote_code=True)", True),
        ("keywords = {'trust_remote_code': True}", True),
        ("AutoConfig.from_pretrained(name, trust_remote_code=setting)", True),
        ("torch.load(file, weights_only=True)", True),
        ("AutoModelForCausalLM.from_pretrained(name)", True),
        ("LlamaForCausalLM.from_pretrained(name)", True),
        ("AutoModel.from_pretrained(name, use_safetensors=None)", True),
        ("eval(text)", True),
        ("AutoModel.from_pretrained(x, use_safetensors=True, trust_remote_code=False)", False),
    ],
)
def test_an_offence_is_found(source: str, is_found: bool) -> None:
    assert bool(list(_offences(source))) == is_found


def test_the_embedded_checkpoint_has_safetensors_and_no_code() -> None:
    suffixes = {path.suffix for path in (ROOT / "models" / "pydoc-llama").iterdir()}
    assert ".safetensors" in suffixes
    assert not suffixes & {".bin", ".pt", ".pth", ".pkl", ".ckpt", ".py"}

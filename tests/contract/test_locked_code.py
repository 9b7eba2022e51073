"""Nothing that is served, deployed or installed unpickles a file or runs code of a checkpoint."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from contract.code_blocks import ROOT

SOURCES = sorted(
    path
    for folder in ("model_repository", "client", "deploy")
    for path in (ROOT / folder).rglob("*.py")
    if "__pycache__" not in path.parts
)

# Loading a file with these runs code in it.
RUNS_WHAT_IT_READS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}

_LOADS_WEIGHTS = re.compile(r"(AutoModel\w*|\w+Model|\w+For[A-Z]\w+)\.from_pretrained")


def _names(node: ast.expr) -> str:
    """Return a dotted name, "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{_names(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def _calls(tree: ast.AST) -> Iterator[tuple[str, dict[str | None, ast.expr]]]:
    """Yield the name and the keywords of every call."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield _names(node.func), {keyword.arg: keyword.value for keyword in node.keywords}


def _offences(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        modules = (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [str(node.module)]
            if isinstance(node, ast.ImportFrom)
            else []
        )
        yield from (f"imports {module}" for module in modules if module.split(".")[0] in RUNS_WHAT_IT_READS)
        # As a keyword, or as the key of a dictionary of keywords.
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
            value = node.value
            if not (isinstance(value, ast.Constant) and value.value is False):
                yield "sets trust_remote_code"
        if isinstance(node, ast.Constant) and node.value == "trust_remote_code":
            yield "sets trust_remote_code"
    for name, keywords in _calls(tree):
        if name in ("eval", "exec", "compile", "__import__"):
            yield f"calls {name}"
        if name == "torch.load":
            yield "calls torch.load"
        if _LOADS_WEIGHTS.fullmatch(name):
            safe = keywords.get("use_safetensors")
            if not (isinstance(safe, ast.Constant) and safe.value is True):
                yield f"calls {name} without use_safetensors=True"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_source_does_not_run_what_it_reads(path: Path) -> None:
    assert list(_offences(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize(
    ("source", "offence"),
    [
        ("import pickle", "imports pickle"),
        ("from joblib import load", "imports joblib"),
        ("AutoConfig.from_pretrained(name, trust_remote_code=True)", "sets trust_remote_code"),
        ("AutoConfig.from_pretrained(name, **{'trust_remote_code': True})", "sets trust_remote_code"),
        ("AutoConfig.from_pretrained(name, trust_remote_code=setting)", "sets trust_remote_code"),
        ("torch.load(file, weights_only=True)", "calls torch.load"),
        ("AutoModelForCausalLM.from_pretrained(name)", "calls AutoModelForCausalLM.from_pretrained without"),
        ("LlamaForCausalLM.from_pretrained(name)", "calls LlamaForCausalLM.from_pretrained without"),
        ("AutoModel.from_pretrained(name, use_safetensors=None)", "calls AutoModel.from_pretrained without"),
        ("eval(text)", "calls eval"),
    ],
)
def test_an_offence_is_found(source: str, offence: str) -> None:
    (found,) = _offences(ast.parse(source))
    assert found.startswith(offence)


def test_trust_remote_code_may_be_false() -> None:
    assert not list(_offences(ast.parse("AutoModel.from_pretrained(x, use_safetensors=True, trust_remote_code=False)")))


def test_the_embedded_checkpoint_has_safetensors_and_no_code() -> None:
    files = [path.name for path in (ROOT / "models" / "pydoc-llama").iterdir()]
    assert [name for name in files if name.endswith((".bin", ".pt", ".pth", ".pkl", ".ckpt", ".py"))] == []
    assert "model.safetensors" in files

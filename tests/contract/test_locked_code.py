"""Nothing that is served, deployed or installed unpickles a file or runs code of a checkpoint."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from contract.code_blocks import ROOT

FOLDERS = ("model_repository", "compatibility", "client", "frontend", "deploy")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))

# Loading a file with these runs code in it.
_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
_CALLS = {"eval", "exec", "compile", "__import__", "torch.load"}
_LOADS_WEIGHTS = re.compile(r"\b(AutoModel\w*|\w+Model|\w+For[A-Z]\w+)\.from_pretrained$")


def _offends(node: ast.AST) -> bool:
    match node:
        case ast.Import(names=modules):
            return any(module.name.split(".")[0] in _MODULES for module in modules)
        case ast.ImportFrom(module=module):
            return str(module).split(".")[0] in _MODULES
        # As a keyword, or as the key of a dictionary of keywords.
        case ast.keyword(arg="trust_remote_code", value=value):
            return ast.unparse(value) != "False"
        case ast.Constant(value="trust_remote_code"):
            return True
        case ast.Call(func=func, keywords=keywords):
            name, arguments = ast.unparse(func), [ast.unparse(keyword) for keyword in keywords]
            return name in _CALLS or bool(_LOADS_WEIGHTS.search(name) and "use_safetensors=True" not in arguments)
    return False


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_source_does_not_run_what_it_reads(path: Path) -> None:
    assert [ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if _offends(node)] == []


def test_the_embedded_checkpoint_has_no_code() -> None:
    suffixes = {path.suffix for path in (ROOT / "models" / "pydoc-llama").iterdir()}
    assert ".safetensors" in suffixes
    assert not suffixes & {".bin", ".pt", ".pth", ".pkl", ".ckpt", ".py"}

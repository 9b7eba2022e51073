"""Generates files from the table of request parameters, `llama_engine.api.parameters`: `make configs`.

Generated are the inputs of every config, the table of inputs in docs/api.md, and the client's `SamplingParams`. With
`--check` nothing is written; stale files are named, and the exit code is 1 if there are any.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import wrap

from llama_engine.api.parameters import NOT_SAMPLING, PARAMETERS, Parameter

REPOSITORY = Path(__file__).parent
ROOT = REPOSITORY.parent
FILES = (
    REPOSITORY / "llama" / "config.pbtxt",
    *sorted((REPOSITORY / "llama" / "configs").glob("*.pbtxt")),
    REPOSITORY / "llama_unary" / "config.pbtxt",
    ROOT / "docs" / "api.md",
    ROOT / "client" / "triton_llama" / "sampling_params.py",
)

SENT_BY_DEFAULT = (
    *("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "frequency_penalty"),
    *("presence_penalty", "stop_words", "bad_words", "exclude_input_in_output"),
)
"""Parameters that the client sends with every request: Triton batches only requests with equal sets of inputs."""

_REGION = re.compile(r"(.*make configs: (\w+).*\n)(?:.*\n)*?(?=.*end of \2)")
"""A generated region: from a line with `make configs: <region>` up to a line with `end of <region>`."""

_PYTHON = {"STRING": "str", "INT32": "int", "UINT64": "int", "FP32": "float", "BOOL": "bool"}
_SAMPLING = {name: row for name, row in PARAMETERS.items() if name not in NOT_SAMPLING}


def inputs() -> list[str]:
    """Return the lines of a config's inputs."""
    lines = []
    for name, row in PARAMETERS.items():
        # Without allow_ragged_batch, lists of unequal length split a batch.
        dims = "[ -1 ], allow_ragged_batch: true" if row.is_list else "[ 1 ]"
        lines += [
            f'  {{ name: "{alias}", data_type: TYPE_{row.type}, dims: {dims}, optional: true }},'
            for alias in (name, *row.aliases)
        ]
    # Triton's text format allows no comma after the last input.
    return [*lines[:-1], lines[-1].removesuffix(",")]


def table() -> list[str]:
    """Return the lines of the Markdown table of inputs."""
    rows = ["| input | type | bound | default | meaning |", "|---|---|---|---|---|"]
    for name, row in PARAMETERS.items():
        names = ", ".join(f"`{alias}`" for alias in (name, *row.aliases))
        kind = f"{row.type} list" if row.is_list else row.type
        rows.append(f"| {names} | {kind} | {row.bound.description} | {_default(name, row)} | {row.meaning} |")
    return rows


def types() -> list[str]:
    """Return the lines of the client's table of types."""
    return [f'    "{name}": ("{row.type}", {row.is_list}),' for name, row in _SAMPLING.items()]


def options() -> list[str]:
    """Return the lines of the fields of the client's `SamplingOptions`."""
    return [f"    {name}: {_python_type(row)}" for name, row in _SAMPLING.items()]


def parameters() -> list[str]:
    """Return the lines of the fields of the client's `SamplingParams`."""
    lines = []
    for name, row in _SAMPLING.items():
        default = row.default if name in SENT_BY_DEFAULT else None
        lines.append(f"    {name}: {_python_type(row)} = {default!r}")
        lines += wrap(f'"""{row.meaning}"""', 120, initial_indent=" " * 4, subsequent_indent=" " * 4)
    return lines


REGIONS: Mapping[str, Callable[[], list[str]]] = {
    function.__name__: function for function in (inputs, table, types, options, parameters)
}


def _python_type(row: Parameter) -> str:
    kind = _PYTHON[row.type]
    return f"Sequence[{kind}] | None" if row.is_list else f"{kind} | None"


def _default(name: str, row: Parameter) -> str:
    if name == "max_tokens":
        text = "the setting `default_max_tokens`"
    elif name == "seed" or row.default in (None, (), ""):
        text = "none"
    else:
        text = str(row.default).lower()
    return f"the checkpoint's `{row.checkpoint}`, else {text}" if row.checkpoint else text


def contents() -> dict[Path, str]:
    """Return the paths of all files with generated regions, with their up-to-date contents."""
    return {path: _REGION.sub(_region, path.read_text()) for path in FILES}


def _region(match: re.Match[str]) -> str:
    return match[1] + "".join(f"{line}\n" for line in REGIONS[match[2]]())


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the stale files, or with `--check` only print their names. Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is stale")
    check = parser.parse_args(arguments).check
    stale = [(path, text) for path, text in contents().items() if path.read_text() != text]
    for path, text in stale:
        print(f"{path.relative_to(ROOT)}: {'stale; run make configs' if check else 'written'}")
        if not check:
            path.write_text(text)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())

"""Write what follows from the table of request parameters, `llama_engine.api.parameters`: `make configs`.

These are the inputs of every config, the table of inputs in docs/api.md, and the client's `SamplingParams`. With
`--check` nothing is written; the files that would change are named and the exit code is 1.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from llama_engine.api.parameters import NOT_SAMPLING, PARAMETERS, Parameter

REPOSITORY = Path(__file__).parent
ROOT = REPOSITORY.parent
CONFIGS = (
    REPOSITORY / "llama" / "config.pbtxt",
    *sorted((REPOSITORY / "llama" / "configs").glob("*.pbtxt")),
    REPOSITORY / "llama_unary" / "config.pbtxt",
)
DOCUMENT = ROOT / "docs" / "api.md"
CLIENT = ROOT / "client" / "triton_llama" / "sampling_params.py"

SENT_BY_DEFAULT = (
    *("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "frequency_penalty"),
    *("presence_penalty", "stop_words", "bad_words", "exclude_input_in_output"),
)
"""What the client sends with every request, at the table's defaults: Triton batches equal sets of inputs only."""

_INPUTS = re.compile(r"(?<=^input \[\n).*?(?=^\])", re.MULTILINE | re.DOTALL)
_TABLE = re.compile(r"(?<=<!-- inputs: make configs -->\n).*?(?=<!-- end of inputs -->)", re.DOTALL)
_PYTHON = {"STRING": "str", "INT32": "int", "UINT64": "int", "FP32": "float", "BOOL": "bool"}

_CLIENT = '''\
"""Sampling parameters of a request: names, types and defaults. The server checks the bounds.

Written by `make configs` from the server's table of request parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypedDict, Unpack

INPUTS: Mapping[str, tuple[str, bool]] = {{
{inputs}
}}
"""The input of each field: Triton's type, and whether it is a list."""


class SamplingOptions(TypedDict, total=False):
    """The fields of `SamplingParams` as keywords."""

{options}


class Options(SamplingOptions, total=False):
    """The keywords of `generate` and `stream`: fields of `SamplingParams`, and seconds in place of the client's."""

    timeout: float | None


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one completion; the defaults decode greedily, up to 128 tokens.

    A field that is None is not sent: the server takes the value from the checkpoint's generation config, else its
    default. The exception is `seed`: the client draws one, so that the input is always present, and reports it in the
    completion. Under `scheduling: batch` Triton batches only requests with the same set of inputs.
    """

{fields}

    @classmethod
    def from_checkpoint(cls) -> SamplingParams:
        """Return parameters with every field None: the checkpoint's generation config decides."""
        return cls(**{{field.name: None for field in fields(cls)}})

    def with_options(self, **options: Unpack[SamplingOptions]) -> SamplingParams:
        """Return these parameters with some of them changed; an unknown name is a TypeError."""
        return replace(self, **options) if options else self
'''


def inputs() -> str:
    """Return the inputs of a config, as the lines between its brackets."""
    lines = []
    for parameter in PARAMETERS.values():
        # Without allow_ragged_batch, lists of unequal length split a batch.
        dims = "[ -1 ], allow_ragged_batch: true" if parameter.is_list else "[ 1 ]"
        lines += [
            f'  {{ name: "{name}", data_type: TYPE_{parameter.type}, dims: {dims}, optional: true }}'
            for name in (parameter.name, *parameter.aliases)
        ]
    return ",\n".join(lines) + "\n"


def table() -> str:
    """Return the table of inputs in Markdown."""
    rows = ["| input | type | bound | default | meaning |", "|---|---|---|---|---|"]
    for parameter in PARAMETERS.values():
        names = ", ".join(f"`{name}`" for name in (parameter.name, *parameter.aliases))
        kind = f"{parameter.type} list" if parameter.is_list else parameter.type
        default = _default(parameter)
        rows.append(f"| {names} | {kind} | {parameter.bound.description} | {default} | {parameter.meaning} |")
    return "\n".join(rows) + "\n"


def sampling_params() -> str:
    """Return the client's module."""
    sent = [parameter for name, parameter in PARAMETERS.items() if name not in NOT_SAMPLING]
    types = {row.name: f"Sequence[{_PYTHON[row.type]}]" if row.is_list else _PYTHON[row.type] for row in sent}
    defaults = {row.name: repr(row.default if row.name in SENT_BY_DEFAULT else None) for row in sent}
    return _CLIENT.format(
        inputs="\n".join(f'    "{row.name}": ("{row.type}", {row.is_list}),' for row in sent),
        options="\n".join(f"    {name}: {type_} | None" for name, type_ in types.items()),
        fields="\n".join(
            f"    {row.name}: {types[row.name]} | None = {defaults[row.name]}\n    {_docstring(row.meaning)}"
            for row in sent
        ),
    )


def _default(parameter: Parameter) -> str:
    default = parameter.default
    if parameter.name == "max_tokens":
        text = "the setting `default_max_tokens`"
    elif parameter.name == "seed" or default in (None, (), ""):
        text = "none"
    else:
        text = str(default).lower()
    return f"the checkpoint's `{parameter.checkpoint}`, else {text}" if parameter.checkpoint else text


def _docstring(sentence: str) -> str:
    lines = [""]
    for word in f'"""{sentence}"""'.split():
        if len(lines[-1]) + len(word) > 114:
            lines.append("")
        lines[-1] += f"{word} "
    return "\n    ".join(line.rstrip() for line in lines)


def contents() -> dict[Path, str]:
    """Return each file with what it must contain."""
    files = {path: _INPUTS.sub(lambda _: inputs(), path.read_text()) for path in CONFIGS}
    files[DOCUMENT] = _TABLE.sub(lambda _: table(), DOCUMENT.read_text())
    files[CLIENT] = sampling_params()
    return files


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files that are stale, or with `--check` name them. Returns the exit code."""
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

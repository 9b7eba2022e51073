"""Writes the regions of configs, docs and the client that follow from the code's own tables: `make configs`.

From the request parameters, `llama_engine.request.parameters`, come the inputs of every config, the table of inputs in
docs/api.md, and the client's `SamplingParams`; docs/settings.md and docs/metrics.md list the engine's settings and
metrics, docs/openai.md the endpoint's paths, fields, settings and metrics. With `--check` nothing is written; stale
files are named, and the exit code is 1 if there are any.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from textwrap import wrap
from typing import Any

from llama_engine.observability.metrics import METRICS
from llama_engine.request.parameter import Parameter
from llama_engine.request.parameters import NOT_SAMPLING, PARAMETERS
from llama_engine.settings import Settings
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BeforeValidator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError
from triton_llama_openai import settings as endpoint
from triton_llama_openai.app import create_app
from triton_llama_openai.metrics import Metrics
from triton_llama_openai.openapi import BODIES, openapi_document
from triton_llama_openai.protocol.schema import IGNORED, MAX_TOKEN
from triton_llama_openai.served.models import Models

ROOT = Path(__file__).parent
REPOSITORY = ROOT / "model_repository"
FILES = (
    REPOSITORY / "llama" / "config.pbtxt",
    *sorted((REPOSITORY / "llama" / "configs").glob("*.pbtxt")),
    REPOSITORY / "llama_unary" / "config.pbtxt",
    *(ROOT / "docs" / f"{page}.md" for page in ("api", "settings", "metrics", "openai")),
    ROOT / "client" / "triton_llama" / "sampling_params.py",
)

SENT_BY_DEFAULT = (
    *("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "frequency_penalty"),
    *("presence_penalty", "stop_words", "bad_words", "exclude_input_in_output"),
)
"""Parameters that the client sends with every request: Triton batches only requests with equal sets of inputs."""

_REGION = re.compile(r"(.*make configs: (\w+).*\n)(?:.*\n)*?(?=.*end of \2)")
"""A generated region: from a line with `make configs: <region>` up to a line with `end of <region>`."""

_PAGE = re.compile(r"docs/([\w-]+\.md)(#[\w-]+)?")
"""A page that a sentence in the code refers to; in a table it is a link."""

_PYTHON = {"STRING": "str", "INT32": "int", "UINT64": "int", "FP32": "float", "BOOL": "bool"}
_SAMPLING = {name: parameter for name, parameter in PARAMETERS.items() if name not in NOT_SAMPLING}


def inputs() -> list[str]:
    """Return the lines of a config's inputs."""
    lines = []
    for name, parameter in PARAMETERS.items():
        # Without allow_ragged_batch, lists of unequal length split a batch.
        dims = "[ -1 ], allow_ragged_batch: true" if parameter.is_list else "[ 1 ]"
        lines += [
            f'  {{ name: "{alias}", data_type: TYPE_{parameter.type}, dims: {dims}, optional: true }},'
            for alias in (name, *parameter.aliases)
        ]
    # Triton's text format allows no comma after the last input.
    return [*lines[:-1], lines[-1].removesuffix(",")]


def table() -> list[str]:
    """Return the lines of the Markdown table of inputs."""
    rows = []
    for name, parameter in PARAMETERS.items():
        kind = f"{parameter.type} list" if parameter.is_list else parameter.type
        names, default = _code(name, *parameter.aliases), _default(name, parameter)
        rows.append((names, kind, parameter.bound.description, default, parameter.meaning))
    return _markdown(("input", "type", "bound", "default", "meaning"), rows)


def types() -> list[str]:
    """Return the lines of the client's table of types."""
    return [f'    "{name}": ("{parameter.type}", {parameter.is_list}),' for name, parameter in _SAMPLING.items()]


def options() -> list[str]:
    """Return the lines of the fields of the client's `SamplingOptions`."""
    return [f"    {name}: {_python_type(parameter)}" for name, parameter in _SAMPLING.items()]


def parameters() -> list[str]:
    """Return the lines of the fields of the client's `SamplingParams`."""
    lines = []
    for name, parameter in _SAMPLING.items():
        default = parameter.default if name in SENT_BY_DEFAULT else None
        lines.append(f"    {name}: {_python_type(parameter)} = {default!r}")
        lines += wrap(f'"""{parameter.meaning}"""', 120, initial_indent=" " * 4, subsequent_indent=" " * 4)
    return lines


def settings() -> list[str]:
    """Return the lines of the table of the engine's settings."""
    rows = []
    for setting in fields(Settings):
        default = setting.metadata["default"] if setting.default is None else _code(setting.default)
        rows.append((_code(setting.name), setting.metadata["bound"].description, default, setting.metadata["meaning"]))
    return _markdown(("setting", "values", "default", "meaning"), rows)


def metrics() -> list[str]:
    """Return the lines of the table of the engine's metrics."""
    rows = []
    for metric in METRICS:
        labels = _code(*filter(None, (metric.label, *metric.info)))
        rows.append((_code(metric.name), metric.kind, labels, metric.help))
    return _markdown(("metric", "kind", "labels", "meaning"), rows)


def endpoint_paths() -> list[str]:
    """Return the lines of the table of the endpoint's paths."""
    app = create_app(endpoint.Settings(lora_updates="on"), Models([]))
    document = openapi_document(app.routes, ignores_unknown=False)
    calls = [
        (f"{method.upper()} {path}", operation.get("description", ""))
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]
    return _markdown(("path", "meaning"), _joined(calls))


def endpoint_fields() -> list[str]:
    """Return the lines of the table of request fields of all paths with a body: supported, ignored, refused ones."""
    paths: dict[tuple[str, str, str, str], list[str]] = {}
    for path, schema in BODIES.items():
        document = schema.model_json_schema()
        for name, field in schema.model_fields.items():
            status, meaning = _status(field)
            name = field.alias or name
            values = "" if status else _values(document["properties"][name], document.get("$defs", {}))
            paths.setdefault((name, status, values, meaning), []).append(_short(path))
    rows = [
        (name, ", ".join(called), status, values, meaning) for (name, status, values, meaning), called in paths.items()
    ]
    # The sort is stable: supported fields come first.
    return _markdown(("field", "path", "", "values", "meaning"), _joined(sorted(rows, key=lambda row: row[2:3])))


def endpoint_settings() -> list[str]:
    """Return the lines of the table of the endpoint's settings."""
    rows = []
    properties = endpoint.Settings.model_json_schema()["properties"]
    for name, field in endpoint.Settings.model_fields.items():
        default = "" if field.default is None else _code(field.default)
        rows.append((_code(name), _values(properties[name], {}), default, str(field.description)))
    return _markdown(("setting", "values", "default", "meaning"), rows)


def endpoint_metrics() -> list[str]:
    """Return the lines of the table of the endpoint's metrics."""
    rows = []
    for family in text_string_to_metric_families(Metrics().page().decode()):
        if not family.name.endswith("_created"):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            rows.append((_code(name), family.type, family.documentation))
    return _markdown(("metric", "kind", "meaning"), rows)


REGIONS: Mapping[str, Callable[[], list[str]]] = {
    function.__name__: function
    for function in (
        *(inputs, table, types, options, parameters, settings, metrics),
        *(endpoint_paths, endpoint_fields, endpoint_settings, endpoint_metrics),
    )
}


def _code(*words: object) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _short(path: str) -> str:
    """Return a path's word: chat, completions, tokenize."""
    return path.removeprefix("/v1").removesuffix("/completions").strip("/") or "completions"


def _link(page: re.Match[str]) -> str:
    name, anchor = page.groups()
    return f"[{anchor[1:].replace('-', ' ') if anchor else name.removesuffix('.md')}]({name}{anchor or ''})"


def _markdown(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table. Line ends in a cell become blanks, pages links."""
    cells = [[_PAGE.sub(_link, " ".join(cell.split())) for cell in row] for row in rows]
    lines = [f"| {' | '.join(row)} |".replace("  ", " ") for row in (heading, *cells)]
    return [lines[0], f"|{'---|' * len(heading)}", *lines[1:]]


def _joined(rows: Sequence[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Join neighbouring rows that differ in their names only, the first cells."""
    for rest, same in groupby(rows, key=lambda row: row[1:]):
        yield _code(*(row[0] for row in same)), *rest


def _status(field: FieldInfo) -> tuple[str, str]:
    """Return what the endpoint does with a field, empty if it supports it, and the field's meaning."""
    if field.json_schema_extra == IGNORED:
        return "ignored", str(field.description)
    for part in field.metadata:
        if isinstance(part, BeforeValidator):
            try:
                part.func("a value")  # type: ignore[call-arg]  # it takes no information
            except PydanticCustomError as refusal:
                return "refused", refusal.message()
    return "", field.description or ""


def _values(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """Describe the values that a JSON schema allows, such as `a whole number, at least 0`; null is left out."""
    match schema:
        case {"$ref": str(reference)}:
            return _values(definitions[reference.rpartition("/")[2]], definitions)
        case {"anyOf": members} | {"oneOf": members}:
            kinds = [_values(member, definitions) for member in members if member.get("type") != "null"]
            return " or ".join(dict.fromkeys(kinds))
        case {"enum": words}:
            return _code(*words)
        case {"const": value}:
            return _code(value if isinstance(value, str) else json.dumps(value))
        case {"type": "array", "items": items}:
            most = f", at most {schema['maxItems']}" if "maxItems" in schema else ""
            return f"list ({_values(items, definitions)}){most}"
        case {"type": "string", "maxLength": most}:
            return f"text of at most {most} characters"
    limits = (
        ("at least", schema.get("minimum")),
        ("above", schema.get("exclusiveMinimum")),
        ("at most", schema.get("maximum")),
    )
    # A limit of 32 or 64 bits is none that a client meets.
    words = [f"{word} {limit}" for word, limit in limits if limit is not None and abs(limit) < MAX_TOKEN]
    kind = {"string": "text", "boolean": "true or false"}.get(schema["type"], schema["type"])
    return f"{kind}, {' and '.join(words)}" if words else kind


def _python_type(parameter: Parameter) -> str:
    kind = _PYTHON[parameter.type]
    return f"Sequence[{kind}] | None" if parameter.is_list else f"{kind} | None"


def _default(name: str, parameter: Parameter) -> str:
    if name == "max_tokens":
        text = "the setting `default_max_tokens`"
    elif name == "seed" or parameter.default in (None, (), ""):
        text = "none"
    else:
        text = str(parameter.default).lower()
    return f"the checkpoint's `{parameter.checkpoint}`, else {text}" if parameter.checkpoint else text


def contents() -> dict[Path, str]:
    """Return the paths of all files with generated regions, with their up-to-date contents.

    Raises ValueError for a region that no file has.
    """
    texts = {path: path.read_text() for path in FILES}
    missing = REGIONS.keys() - {match[2] for text in texts.values() for match in _REGION.finditer(text)}
    if missing:
        raise ValueError(f"no file has the regions {', '.join(sorted(missing))}")
    return {path: _REGION.sub(_region, text) for path, text in texts.items()}


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

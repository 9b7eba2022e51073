"""A run on a GPU (`perf/gpu`): the aims, the engine's decoding beside its limit, and the products of a step."""

from __future__ import annotations

from collections.abc import Callable

from perf.report.cells import figure, percent, several
from perf.report.fields import Fields
from perf.report.run import Run
from perf.report.table import Column, Table, table

_DECODING = ("graph", "decode", "stock_engine", "stock")
_PRODUCTS = {
    "fp16": "FP16",
    "bitsandbytes": "bitsandbytes",
    "bitsandbytes_6": "bitsandbytes, threshold 6",
    "w8a8": "rounded activations",
    "dequantize": "widened, then FP16",
    "engine_many": "ours, many rows",
    "fused": "ours, fused",
}


def verdict(run: Run) -> Table | None:
    """Return every aim beside what was measured; None if there is no verdict."""
    if "verdict" not in run.fields:
        return None
    return table(
        [
            Column("aim", lambda row: row.text("aim"), right=False),
            Column("bound", lambda row: _figure(row, "bound")),
            Column("measured", lambda row: _figure(row, "measured")),
            Column("met", lambda row: ("yes" if row.flag("met") else "no") if "met" in row else None, right=False),
            Column("measured by", lambda row: row.optional_text("from"), right=False),
        ],
        run.fields.listed("verdict"),
        [run.origin.line()],
    )


def decoding(run: Run) -> Table | None:
    """Return tokens/s of waves of rows, the engine's and generate()'s; None if none was measured."""
    rows = [(_what(fields), fields) for part in _DECODING for fields in _entries(run, part)]
    if not rows:
        return None
    return table(
        [
            Column("what", lambda row: row[0], right=False),
            Column("weights", lambda row: row[1].text("title"), right=False),
            Column("rows", lambda row: str(row[1].count("rows"))),
            Column("requests/s", lambda row: figure(row[1].number("requests_per_second"))),
            Column("tokens/s", lambda row: figure(row[1].number("tokens_per_second"))),
            Column("a step p50, ms", lambda row: _step(row[1])),
            Column("limit of a step, ms", lambda row: _figure(row[1], "step_limit_ms")),
            Column("limit, tokens/s", lambda row: figure(row[1].part("limit").number("tokens_per_second"))),
            Column("of the limit", lambda row: percent(row[1].part("limit").number("fraction"))),
            Column("VRAM at most, MiB", lambda row: _figure(row[1], "vram_mib")),
        ],
        rows,
        [
            f"Prompts of {run.settings.count('prompt_tokens')} tokens, {run.settings.count('output_tokens')} new ones; "
            "all rows of a wave begin and end together.",
            *_not_run(run, *_DECODING),
            run.origin.line(),
        ],
    )


def products(run: Run) -> Table | None:
    """Return what each way to multiply with an 8-bit weight takes, a matrix and a number of rows a line."""
    rows = _entries(run, "products")
    if not rows:
        return None
    return table(
        [
            Column("matrix", lambda row: f"{row.count('outputs')} x {row.count('inputs')}", right=False),
            Column("rows", lambda row: str(row.count("rows"))),
            *(Column(title, _way(name)) for name, title in _PRODUCTS.items()),
            Column("reading it, INT8 / FP16", _reading),
        ],
        rows,
        [
            "Microseconds a product, replayed as a CUDA graph where it can be captured, else as a program calls it.",
            *_not_run(run, "products"),
            run.origin.line(),
        ],
    )


def _what(row: Fields) -> str:
    """Return what decoded, by its own account: kernels that were asked for may not have been used."""
    steps = row.optional_text("steps")
    return "generate(), one batch" if steps is None else f"the engine, {steps.removeprefix('decode steps: ')}"


def _entries(run: Run, part: str) -> list[Fields]:
    found = run.fields.part("measurements").parts()
    return [fields for key, fields in found if key.split("/")[0] == part and "not_run" not in fields]


def _not_run(run: Run, *parts: str) -> list[str]:
    entries = [(key, fields) for key, fields in run.fields.part("measurements").parts() if key.split("/")[0] in parts]
    reasons = [f"{key} ({fields.text('not_run')})" for key, fields in entries if "not_run" in fields]
    return [f"Not run: {'; '.join(reasons)}."] if reasons else []


def _figure(row: Fields, name: str) -> str | None:
    found = row.optional_number(name)
    return None if found is None else figure(found)


def _step(row: Fields) -> str | None:
    step = row.optional_part("step_ms")
    return None if step is None else figure(step.number("p50"))


def _reading(row: Fields) -> str:
    bandwidth = row.part("bandwidth_us")
    return several(bandwidth.number("int8"), bandwidth.number("fp16"))


def _way(name: str) -> Callable[[Fields], str | None]:
    def cell(row: Fields) -> str | None:
        way = row.part("ways").optional_part(name)
        if way is None or "failed" in way:
            return None
        captured = way.optional_number("graph_us")
        return figure(way.number("eager_us") if captured is None else captured)

    return cell

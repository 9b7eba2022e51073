"""Fill the tables of docs/benchmarks.md from perf/results/*.json (`make report`).

A table stands between <!-- table: NAME --> and <!-- end: NAME -->; the rest of the page stays as it is. Figures have
three significant digits: more would claim a precision that no run has.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from perf.environment import ROOT
from perf.results_file import RESULTS

PAGE = ROOT / "docs" / "benchmarks.md"

Row = Mapping[str, Any]
"""A measurement, or several in a line of a table."""


class Result(NamedTuple):
    """A result file. file: its path inside the repository, or its name alone."""

    file: str
    content: Row

    def entries(self, prefix: str) -> list[Row]:
        """Return what stands under the keys that begin so, measured or not."""
        return [row for key, row in self.content["measurements"].items() if key.startswith(prefix)]

    def measured(self, prefix: str) -> list[Row]:
        """Return the measurements whose keys begin so."""
        return [row for row in self.entries(prefix) if "not_run" not in row]

    def conditions(self, prefix: str) -> list[str]:
        """Return the notes beneath a table: steps, errors, what did not run, steal time, machine and command."""
        rows, settings = self.measured(prefix), self.content["settings"]
        steps = [(row["title"], at(row, "settings/decode_steps")) for row in rows if row["weights"] == "INT8"]
        notes = [
            _by_server("Decode steps", steps),
            _by_server("Failed requests", [(row["title"], row.get("errors") or None) for row in rows]),
            _by_server("Not run", [(row["title"], row.get("not_run")) for row in self.entries(prefix)]),
        ]
        steal, title = max((row.get("stolen_share", 0.0), row["title"]) for row in rows)
        if steal >= 0.005:  # less is noise
            notes.append(f"Steal time: at most {percent(steal)} of the processors' time, with {title}.")
        if "text" in settings:
            notes.append(
                f"On {settings['text']}: {settings['tokens']:,} predicted tokens in texts of at most "
                f"{settings['context']}; ± is one standard error."
            )
        machine = self.content["machine"]
        cores = f", {machine['cores']} cores (no GPU)" if machine["device"].startswith("CPU") else ""
        uncommitted = " with uncommitted changes" if machine["uncommitted_changes"] else ""
        versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        notes.append(
            f"{machine['device']}{cores}; {settings['model']}; {self.content['date'].split('T')[0]}; "
            f"commit `{machine['commit'][:7]}`{uncommitted}; Python {machine['python']}, {versions}. "
            f"`{self.content['command']}` writes `{self.file}`."
        )
        return [*filter(None, notes)]


def read(file: Path) -> Result:
    """Read a result file. Raises OSError or ValueError."""
    path = file.resolve()
    name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
    return Result(name, json.loads(path.read_text()))


def _by_server(name: str, values: Sequence[tuple[str, object]]) -> str:
    """Return the values as a note, each server's once; "" if all are None."""
    texts = dict.fromkeys(f"{title}: {value}" for title, value in values if value is not None)
    return f"{name}, {'; '.join(texts)}." if texts else ""


def figure(value: float) -> str:
    """Return at least three significant digits without an exponent: 0.0123, 1.23, 12.3, 123, 1,235."""
    if value == 0:
        return "0"
    for digits in range(8):
        if abs(value) >= 10.0 ** (2 - digits):
            return f"{value:,.{digits}f}"
    return f"{value:.2e}"


def percent(share: float) -> str:
    """Return a share of 1 in percent, with a digit more below 10 % and from 90 %."""
    return f"{100 * share:.{0 if 0.0995 <= share < 0.9 else 1}f} %"


def several(*values: float) -> str:
    """Return percentiles in one cell: 1.23 / 4.56."""
    return " / ".join(map(figure, values))


def at(row: Any, path: str) -> Any:  # noqa: ANN401 - JSON
    """Return a row's value at a path of keys, such as limit/fraction; None where there is none."""
    for key in path.split("/"):
        row = None if row is None else row.get(key)
    return row


class Column(NamedTuple):
    """path: of a row's value. shown: the value as text. A column without a value in any row is left out."""

    title: str
    path: str
    shown: Callable[[Any], str] = figure

    def cell(self, row: Row) -> str | None:
        """Return the value's text; None where there is no value."""
        value = at(row, self.path)
        return None if value is None else self.shown(value)


class Table(NamedTuple):
    """note: of the load, beneath it, before the conditions; "" for none."""

    columns: Sequence[Column]
    rows: Sequence[Row]
    note: str = ""


def pivot(rows: Sequence[Row], line: Sequence[str], column: str) -> list[Row]:
    """Join the rows with the same values at the paths `line`.

    A line has the fields of its first row, and every whole row by its value at the path `column`.
    """
    lines: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        values = tuple(at(row, path) for path in line)
        lines.setdefault(values, {**row})[str(at(row, column))] = row
    return [*lines.values()]


def _p50_p95(percentiles: Row) -> str:
    return several(percentiles["p50"], percentiles["p95"])


def _latency(percentiles: Row) -> str:
    # Of so few requests the 99th percentile would be the maximum.
    return several(*(percentiles[name] / 1e3 for name in ("p50", "p95", "max")))


def _lengths(row: Row) -> str:
    mix, mean = row["load"]["mix"], row["load"]["mean_output_tokens"]
    return f"new tokens: {'all' if mix == 'equal' else f'{mix}, mean'} {mean:.0f}."


INTEGER = "{:,.0f}".format
SERVER = Column("server", "title", str)
USERS = Column("users", "load/concurrency", INTEGER)
MEMORY = (
    Column("weights", "weights", str),
    Column("MiB", "memory/weights_mib"),
    Column("memory of the processes, MiB", "memory/process_mib", INTEGER),
    Column("start, s", "start/seconds"),
    Column("largest process's peak at the start, MiB", "start/peak_mib", INTEGER),
)
REQUESTS = Column("requests", "requests", INTEGER)
LATENCY = Column("latency p50 / p95 / max, s", "latency_ms", _latency)
TOKENS = Column("tokens/s", "tokens_per_second")
LIMIT = (
    Column("limit, tokens/s", "limit/tokens_per_second"),
    Column("of the limit", "limit/fraction", percent),
    Column("set by", "limit/bound_by", str),
)
TTFT = Column("first token p50 / p95, ms", "time_to_first_token_ms", _p50_p95)
ITL = Column("between tokens p50 / p95, ms", "inter_token_latency_ms", _p50_p95)


def article(rows: Sequence[Row]) -> Table:
    """The article's setting, a row for each server."""
    # FP16 would compare number formats on a CPU.
    if naive := {row["server"]: row["tokens_per_second"] for row in rows}.get("naive_fp32"):
        rows = [{**row, "over_naive": row["tokens_per_second"] / naive} for row in rows]
    columns = [
        *(SERVER, *MEMORY, REQUESTS, LATENCY),
        Column("requests/s", "requests_per_second"),
        TOKENS,
        Column("over naive FP32", "over_naive", lambda ratio: f"{figure(ratio)} ×"),
        Column("Triton's batch", "mean_batch"),
        Column("sequences per step", "mean_sequences"),
        *LIMIT,
    ]
    return Table(columns, rows, f"{rows[0]['load']['concurrency']} requests at a time; {_lengths(rows[0])}")


def users(rows: Sequence[Row]) -> Table:
    """Tokens/s of every server at each number of users, the fastest at 32 first."""
    counts = sorted({row["load"]["concurrency"] for row in rows})
    rate = "32/tokens_per_second"
    lines = sorted(pivot(rows, ["server"], "load/concurrency"), key=lambda line: -(at(line, rate) or 0.0))
    columns = [
        Column("tokens/s", "title", str),
        *(Column(f"{count} user{'' if count == 1 else 's'}", f"{count}/tokens_per_second") for count in counts),
    ]
    return Table(columns, lines, f"At most 32 requests are decoded at a time; {_lengths(rows[0])}")


def large(rows: Sequence[Row]) -> Table:
    """Our server and others with a larger model."""
    rows = sorted(rows, key=lambda row: int(row["load"]["concurrency"]))
    columns = [USERS, SERVER, *MEMORY, REQUESTS, TTFT, ITL, TOKENS, *LIMIT]
    return Table(columns, rows, f"{rows[0]['model']}; {_lengths(rows[0])}")


def prefixes(rows: Sequence[Row]) -> Table:
    """Chats, retrieval and prompts without a common prefix: our cache on and off, and vLLM's."""
    caches = {
        "triton_llama_int8_prefix_cache_on": "cache on",
        "triton_llama_int8_prefix_cache_off": "cache off",
        "vllm_int8_prefix_cache": "vLLM INT8",
        "vllm_prefix_cache": "vLLM floats",
    }
    columns = [
        Column("model", "model", lambda model: str(model).split(" parameters")[0].removeprefix("Llama of ")),
        Column("load", "load/mix", str),
        USERS,
    ]
    for title, path, shown in (
        ("TTFT p50 / p95, ms", "time_to_first_token_ms", _p50_p95),
        ("tokens/s", "tokens_per_second", figure),
        ("hit rate", "hit_rate", percent),
    ):
        columns += [Column(f"{title}: {name}", f"{server}/{path}", shown) for server, name in caches.items()]
    return Table(columns, pivot(rows, ["model", "load/mix", "load/concurrency"], "server"))


def quality(rows: Sequence[Row]) -> Table:
    """The unquantized weights and each quantization's distance from them."""
    columns = [
        Column("weights", "title", str),
        Column("MiB", "weights_mib"),
        Column("perplexity", "perplexity", "{:.3f}".format),
        Column("loss over the first row's, nats", "loss_difference", "{0[mean]:+.5f} ± {0[standard_error]:.5f}".format),
        Column("KL divergence mean / p99, nats", "kl_nats", lambda nats: several(nats["mean"], nats["p99"])),
        Column("products, one term = 1", "products", "{:.2f}".format),
        Column("same best token", "top1_agreement", percent),
        Column("over llama.cpp's FP32", "over_fp32", "{:+.2%}".format),
    ]
    return Table(columns, rows)


TABLES = {
    "article": ("bench", "article", article),
    "users": ("bench", "users", users),
    "users-avx2": ("bench-avx2", "users", users),
    "users-smollm2": ("bench-smollm2", "users", users),
    "large": ("bench", "large", large),
    "prefixes": ("bench-prefixes", "prefixes", prefixes),
    "formats": ("bench-formats", "formats", large),
    "formats-gguf": ("bench-formats-gguf", "formats", large),
    "7b": ("bench-7b", "7b", large),
    "quality": ("quality", "", quality),
    "quality-llama-cpp": ("quality-llama-cpp", "", quality),
    "quality-formats": ("quality-formats", "", quality),
}
"""For each table's name in the page: its results file, the beginning of its measurements' keys, and what makes it."""


def markdown(result: Result, prefix: str, make: Callable[[Sequence[Row]], Table]) -> str:
    """Return a table and the notes beneath it, without a final newline; "" if nothing was measured."""
    measured = result.measured(prefix)
    if not measured:
        return ""
    columns, rows, note = make(measured)
    used = [column for column in columns if any(column.cell(row) is not None for row in rows)]
    lines = [
        [column.title for column in used],
        ["---" if column.shown is str else "---:" for column in used],
        *([column.cell(row) or "–" for column in used] for row in rows),
    ]
    notes = [*filter(None, [note]), *result.conditions(prefix)]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", *(f"- {note}" for note in notes)])


def summary(result: Result) -> str:
    """Return the tables that a run of `make bench` ends with."""
    bench = ("article", "users", "large", "prefixes", "formats", "7b")
    return "\n\n".join(filter(None, (markdown(result, *TABLES[name][1:]) for name in bench)))


def filled(page: str) -> str:
    """Return a page with every table's content. Raises ValueError unless it has each exactly once."""
    for name, (file, prefix, make) in TABLES.items():
        begin, end = f"<!-- table: {name} -->\n", f"<!-- end: {name} -->\n"
        if (page.count(begin), page.count(end)) != (1, 1):
            raise ValueError(f"the page has not one table {name}, but {page.count(begin)}")
        before, rest = page.split(begin)
        path = RESULTS / f"{file}.json"
        content = markdown(read(path), prefix, make) if path.exists() else "Not measured yet."
        page = f"{before}{begin}\n{content}\n\n{end}{rest.split(end)[1]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))

"""Fill the tables of docs/benchmarks.md from perf/results/*.json, or check that they are current (`make report`).

A table stands between <!-- table: NAME --> and <!-- end: NAME -->; the rest of the page stays as it is. Figures have
three significant digits: more would claim a precision that no run has.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from perf.environment import ROOT
from perf.results_file import RESULTS

PAGE = ROOT / "docs" / "benchmarks.md"
MIN_STEAL = 0.005
"""The smallest share of steal time that is mentioned."""

Row = Mapping[str, Any]
"""A measurement."""


class NotMeasuredError(Exception):
    """A result has nothing for a table."""


class Result(NamedTuple):
    """A result file. file: its path inside the repository, or its name alone."""

    file: str
    content: Row

    def measured(self, prefix: str) -> list[Row]:
        """Return the measurements whose keys begin so. Raises NotMeasuredError if there is none."""
        rows = [row for row in self._entries(prefix) if _reason(row) is None]
        if not rows:
            raise NotMeasuredError(f"{self.file} has no measurement of {prefix}")
        return rows

    def conditions(self, prefix: str) -> list[str]:
        """Return the notes beneath a table: steps, steal time, what did not run, machine, versions and command."""
        rows, notes = self.measured(prefix), list[str]()
        steps = {row["title"]: at(row, "settings/decode_steps") for row in rows if row["weights"] == "INT8"}
        if ours := [f"{title}: {how}" for title, how in sorted(steps.items()) if how is not None]:
            notes.append(f"Decode steps, {'; '.join(ours)}.")
        steal, title = max((row.get("stolen_share", 0.0), row["title"]) for row in rows)
        if steal >= MIN_STEAL:
            notes.append(f"Steal time: at most {percent(steal)} of the processors' time, with {title}.")
        reasons = {row["title"]: why for row in self._entries(prefix) if (why := _reason(row)) is not None}
        if reasons:
            notes.append(f"Not run: {'; '.join(f'{title} ({why})' for title, why in reasons.items())}.")
        return [*notes, self.origin()]

    def origin(self) -> str:
        """Return machine, model, date, commit, versions and command; one line of Markdown."""
        machine, settings = self.content["machine"], self.content["settings"]
        cores = f", {machine['cores']} cores (no GPU)" if machine["device"].startswith("CPU") else ""
        uncommitted = " with uncommitted changes" if machine["uncommitted_changes"] else ""
        versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        return (
            f"{machine['device']}{cores}; {settings['model']}; {self.content['date'].split('T')[0]}; "
            f"commit `{machine['commit'][:7]}`{uncommitted}; Python {machine['python']}, {versions}. "
            f"`{self.content['command']}` writes `{self.file}`."
        )

    def _entries(self, prefix: str) -> list[Row]:
        return [row for key, row in self.content["measurements"].items() if key.startswith(prefix)]


def read(file: Path) -> Result:
    """Read a result file. Raises NotMeasuredError if there is none, OSError or ValueError."""
    path = file.resolve()
    # Pages contain no folders of a machine.
    name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
    if not path.exists():
        raise NotMeasuredError(f"{path.stem} is not measured yet")
    return Result(name, json.loads(path.read_text()))


def _reason(row: Row) -> str | None:
    """Return why there is no measurement; None if there is one."""
    # A load without a single answer has no latencies.
    if row.get("errors") and "latency_ms" not in row:
        return f"all {row['errors']} requests failed"
    return row.get("not_run")


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
    """cell: the path of a row's value, or a function of the row; None where it doesn't apply. shown: a number as text.

    A column that applies to no row is left out.
    """

    title: str
    cell: str | Callable[[Any], str | float | None]
    right: bool = True
    shown: Callable[[Any], str] = figure

    def text(self, row: object) -> str | None:
        """Return a row's cell."""
        value = at(row, self.cell) if isinstance(self.cell, str) else self.cell(row)
        return value if value is None or isinstance(value, str) else self.shown(value)


def table(columns: Sequence[Column], rows: Sequence[object], notes: Sequence[str]) -> str:
    """Return a table in Markdown and the notes beneath it, without a final newline."""
    cells = [(column, [column.text(row) for row in rows]) for column in columns]
    used = [(column, texts) for column, texts in cells if any(text is not None for text in texts)]
    lines: list[Sequence[str | None]] = [
        [column.title for column, _ in used],
        ["---:" if column.right else "---" for column, _ in used],
        *zip(*(texts for _, texts in used), strict=True),
    ]
    text = "\n".join("| " + " | ".join("–" if cell is None else cell for cell in line) + " |" for line in lines)
    return "\n\n".join([text, "\n".join(f"- {note}" for note in notes)])


def _server(row: Row) -> str:
    title, errors = row["title"], row["errors"]
    return f"{title} ({errors} error{'s' if errors > 1 else ''})" if errors else f"{title}"


def _weights(row: Row) -> str:
    size = at(row, "memory/weights_mib")
    return f"{row['weights']}" if size is None else f"{row['weights']}, {figure(size)}"


def _p50_p95(percentiles: Row) -> str:
    return several(percentiles["p50"], percentiles["p95"])


def _latency(row: Row) -> str:
    # Of so few requests the 99th percentile would be the maximum.
    return several(*(row["latency_ms"][name] / 1e3 for name in ("p50", "p95", "max")))


def _lengths(row: Row) -> str:
    load = row["load"]
    mean = f"{load['mean_output_tokens']:.0f}"
    return f"new tokens: {f'all {mean}' if load['mix'] == 'equal' else load['mix'] + ', mean ' + mean}"


SERVER = Column("server", _server, right=False)
USERS = Column("users", "load/concurrency", shown=str)
WEIGHTS = Column("weights, MiB", _weights, right=False)
MEMORY = Column("memory of the processes, MiB", "memory/process_mib", shown="{:,.0f}".format)
REQUESTS = Column("requests", "requests", shown="{:,}".format)
LATENCY = Column("latency p50 / p95 / max, s", _latency)
TOKENS = Column("tokens/s", "tokens_per_second")
LIMIT = Column("limit, tokens/s", "limit/tokens_per_second")
OF_LIMIT = Column("of the limit", "limit/fraction", shown=percent)
BOUND = Column("set by", "limit/bound_by", right=False)
TTFT = Column("first token p50 / p95, ms", "time_to_first_token_ms", shown=_p50_p95)
ITL = Column("between tokens p50 / p95, ms", "inter_token_latency_ms", shown=_p50_p95)


def article(result: Result) -> str:
    """The article's setting, a row for each server."""
    rows = result.measured("article/equal/")
    naive = {row["server"]: row["tokens_per_second"] for row in rows}.get("naive_fp32")

    def over_naive(row: Row) -> str | None:
        return None if naive is None else f"{figure(row['tokens_per_second'] / naive)} ×"

    return table(
        [
            *(SERVER, WEIGHTS, MEMORY, REQUESTS, LATENCY),
            Column("requests/s", "requests_per_second"),
            TOKENS,
            # FP16 would compare number formats on a CPU.
            Column("over naive FP32", over_naive),
            Column("Triton's batch", "mean_batch"),
            Column("rows per step", "mean_rows"),
            *(LIMIT, OF_LIMIT, BOUND),
        ],
        rows,
        [
            f"{rows[0]['load']['concurrency']} requests at a time; {_lengths(rows[0])}.",
            *result.conditions("article/equal/"),
        ],
    )


def users(result: Result) -> str:
    """Tokens/s of every server at each number of users, the fastest first, at uniform and geometric lengths."""
    rows = result.measured("users/")
    rates = {(row["server"], row["load"]["mix"], row["load"]["concurrency"]): row["tokens_per_second"] for row in rows}
    loads = sorted({(mix, count) for _, mix, count in rates}, key=lambda load: (load[0] != "uniform", load[1]))

    def column(mix: str, count: int) -> Column:
        return Column(
            f"{count} user{'' if count == 1 else 's'}, {mix}", lambda row: rates.get((row["server"], mix, count))
        )

    def title(row: Row) -> str:
        return f"{row['title']}" if row["weights"] in row["title"] else f"{row['title']}, {row['weights']}"

    servers = {row["server"]: row for row in rows}.values()
    fastest_first = sorted(servers, key=lambda row: -rates.get((row["server"], "uniform", 32), 0.0))
    return table(
        [Column("tokens/s", title, right=False), *(column(*load) for load in loads)],
        fastest_first,
        [
            f"New tokens: {' and '.join(dict.fromkeys(mix for mix, _ in loads))}, mean "
            f"{rows[0]['load']['mean_output_tokens']:.0f}. Every server decodes at most 32 requests at a time.",
            *result.conditions("users/"),
        ],
    )


def large(result: Result) -> str:
    """Our server and vLLM with a larger model."""
    rows = result.measured("large/")
    columns = [USERS, SERVER, WEIGHTS, MEMORY, REQUESTS, LATENCY, TTFT, ITL, TOKENS, LIMIT, OF_LIMIT, BOUND]
    return table(columns, rows, [f"{rows[0]['model']}; {_lengths(rows[0])}.", *result.conditions("large/")])


def formats(result: Result) -> str:
    """One model's weights in the formats of checkpoints, by server."""
    rows = sorted(result.measured("formats/"), key=lambda row: int(row["load"]["concurrency"]))
    notes = [f"{rows[0]['model']}; {_lengths(rows[0])}.", *result.conditions("formats/")]
    return table([USERS, SERVER, WEIGHTS, MEMORY, REQUESTS, TTFT, ITL, TOKENS], rows, notes)


CACHES = {
    "triton_llama_int8_prefix_cache_on": "cache on",
    "triton_llama_int8_prefix_cache_off": "cache off",
    "vllm_int8_prefix_cache": "vLLM INT8",
    "vllm_prefix_cache": "vLLM floats",
}
"""Servers of the loads with prefixes, and their names in the heads of columns."""


class _PrefixLine(NamedTuple):
    """A load at a number of users. ttft: the percentiles' name in its measurements. rounds: these, by server."""

    load: str
    ttft: str
    model: str
    users: int
    rounds: Mapping[str, Sequence[Row]]

    def median(self, server: str, path: str) -> float | None:
        """Return the median over a server's rounds; None if nothing was measured there."""
        values = [value for row in self.rounds.get(server, ()) if (value := at(row, path)) is not None]
        return statistics.median(values) if values else None


def prefixes(result: Result) -> str:
    """Chats, retrieval and prompts without a common prefix: our cache on and off, and vLLM's."""
    rows = result.measured("prefixes/")
    grouped: dict[tuple[str, str, int], dict[str, list[Row]]] = {}
    for row in rows:
        load = row["load"]
        rounds = grouped.setdefault((row["model"], load["kind"], load["concurrency"]), {})
        rounds.setdefault(row["server"], []).append(row)
    lines: list[_PrefixLine] = []
    for (model, kind, count), rounds in grouped.items():
        size = model.split(" parameters")[0].removeprefix("Llama of ")
        first = "first turns of a chat" if kind == "chat" else kind
        lines.append(_PrefixLine(first, "first_turn_ttft_ms", size, count, rounds))
        if kind == "chat":
            lines.append(_PrefixLine("later turns", "later_turns_ttft_ms", size, count, rounds))

    def ttft(server: str) -> Callable[[_PrefixLine], str | None]:
        def cell(line: _PrefixLine) -> str | None:
            p50, p95 = (line.median(server, f"{line.ttft}/{name}") for name in ("p50", "p95"))
            return None if p50 is None or p95 is None else several(p50, p95)

        return cell

    def rate(server: str, path: str) -> Callable[[_PrefixLine], float | None]:
        # A chat's are of all its turns.
        return lambda line: None if line.load.startswith("first turns") else line.median(server, path)

    return table(
        [
            Column("model", lambda line: line.model, right=False),
            Column("load", lambda line: line.load, right=False),
            Column("users", lambda line: str(line.users)),
            *(Column(f"TTFT p50 / p95, ms: {name}", ttft(server)) for server, name in CACHES.items()),
            *(Column(f"tokens/s: {name}", rate(server, "tokens_per_second")) for server, name in CACHES.items()),
            *(
                Column(f"hit rate: {name}", rate(server, "hit_rate"), shown=percent)
                for server, name in CACHES.items()
                if name != "cache off"
            ),
        ],
        lines,
        [
            "Hit rate: cached tokens of prompts over all tokens of prompts. Tokens/s and hit rate are of all turns. "
            "Where a load has several rounds, with our cache on and off in turn, figures are the medians.",
            *result.conditions("prefixes/"),
        ],
    )


def quality(result: Result) -> str:
    """The unquantized weights and each quantization's distance from them."""

    def loss(difference: Row) -> str:
        return f"{difference['mean']:+.5f} ± {difference['standard_error']:.5f}"

    def divergence(nats: Row) -> str:
        return several(nats["mean"], nats["p99"])

    settings = result.content["settings"]
    text = f"{settings['text']} {settings.get('python') or ''}".strip()
    return table(
        [
            Column("weights", "title", right=False),
            Column("MiB", "weights_mib"),
            Column("perplexity", "perplexity", shown="{:.3f}".format),
            Column("loss over the first row's, nats per token", "loss_difference", shown=loss),
            Column("KL divergence mean / p99, nats", "kl_nats", shown=divergence),
            Column("KL from weights only, head too", "kl_from_weights_only_nats", shown=divergence),
            Column("products, one term = 1", "products", shown="{:.2f}".format),
            Column("same best token", "top1_agreement", shown=percent),
        ],
        result.measured(""),
        [
            f"On {text}: {settings['tokens']:,} predicted tokens in rows of at most {settings['context']}; ± is one "
            "standard error.",
            result.origin(),
        ],
    )


BENCH = (article, users, large, prefixes, formats)
TABLES: Mapping[str, tuple[str, Callable[[Result], str]]] = {
    "article": ("bench", article),
    "users": ("bench", users),
    "users-avx2": ("bench-avx2", users),
    "large": ("bench", large),
    "prefixes": ("bench-prefixes", prefixes),
    "formats": ("bench-formats", formats),
    "formats-gguf": ("bench-formats-gguf", formats),
    "quality": ("quality", quality),
    "quality-formats": ("quality-formats", quality),
}
"""For each table's name in the page: its results file, and the function that makes the table."""


def summary(result: Result) -> str:
    """Return the tables that a run of `make bench` ends with."""
    made: list[str] = []
    for make in BENCH:
        with suppress(NotMeasuredError):
            made.append(make(result))
    return "\n\n".join(made)


def filled(page: str) -> str:
    """Return a page with every table's content. Raises ValueError unless it has each exactly once."""
    for name, (file, make) in TABLES.items():
        block = f"<!-- table: {name} -->\n\n{make(read(RESULTS / f'{file}.json'))}\n\n<!-- end: {name} -->"
        pattern = rf"^<!-- table: {name} -->$.*?^<!-- end: {name} -->$"
        page, count = re.subn(pattern, lambda _, block=block: block, page, flags=re.MULTILINE | re.DOTALL)  # type: ignore[misc]
        if count != 1:
            raise ValueError(f"the page has {count} tables {name}, not one")
    return page


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, or check it; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.report", description=__doc__, epilog="Exit code: 1 if --check found a difference, else 0."
    )
    parser.add_argument("--check", action="store_true", help="write nothing; say whether the page differs")
    check = parser.parse_args(arguments).check
    before = PAGE.read_text()
    page = filled(before)
    if page == before:
        return 0
    if check:
        print(f"{PAGE} differs from the results: run make report", file=sys.stderr)
        return 1
    PAGE.write_text(page)
    print(f"{PAGE} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())

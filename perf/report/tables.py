"""The tables of docs/benchmarks.md, in Markdown. Each raises NotMeasuredError if a result has nothing for it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from perf.report.results import NotMeasuredError, Result, Row
from perf.report.text import Column, at, figure, percent, several, table
from perf.roofline.rates import DeviceRates

MIN_STEAL = 0.005
"""The smallest share of steal time that is mentioned."""
WINDOW = (
    "Throughput is the steady state's: from the first request after the warm-up to the first answer after the last "
    "request was sent; requests/s is tokens/s over the mean length. Latencies cover all measured requests, including "
    "those answered after the steady state."
)
BASELINES = ("naive_fp32", "naive_fp16")
"""Entries to compare others with; the first one measured is used. FP16 alone would compare number formats on a CPU."""
Rows = Sequence[Row]


def label(row: Row) -> str:
    """Return a server's title with the weights, unless the title names them."""
    title: str = row["title"]
    return title if row["weights"] in title else f"{title}, {row['weights']}"


def lengths(load: Row) -> str:
    """Return the distribution of output lengths, in words."""
    mean = f"{load['mean_output_tokens']:.0f}"
    return f"all {mean}" if load["mix"] == "equal" else f"{load['mix']}, mean {mean}"


def _server(row: Row) -> str:
    title, errors = row["title"], row["errors"]
    return f"{title} ({errors} error{'s' if errors > 1 else ''})" if errors else f"{title}"


def _weights(row: Row) -> str:
    size = at(row, "memory/weights_mib")
    return f"{row['weights']}" if size is None else f"{row['weights']}, {figure(size)}"


def _latency(row: Row) -> str:
    # Of so few requests the 99th percentile would be the maximum.
    return several(*(row["latency_ms"][name] / 1e3 for name in ("p50", "p95", "max")))


def _p50_p95(percentiles: Row) -> str:
    return several(percentiles["p50"], percentiles["p95"])


SERVER = Column("server", _server, right=False)
WEIGHTS = Column("weights, MiB", _weights, right=False)
LENGTHS = Column("new tokens", lambda row: lengths(row["load"]), right=False)
REQUESTS = Column("requests", "requests", shown="{:,}".format)
LATENCY = Column("latency p50 / p95 / max, s", _latency)
REQUESTS_RATE = Column("requests/s", "requests_per_second")
TOKENS = Column("tokens/s", "tokens_per_second")
ROWS = Column("rows per step", "mean_rows")
BATCH = Column("Triton's batch", "mean_batch")
LIMIT = Column("limit, tokens/s", "limit/tokens_per_second")
OF_LIMIT = Column("of the limit", "limit/fraction", shown=percent)
TTFT = Column("first token p50 / p95, ms", "time_to_first_token_ms", shown=_p50_p95)
ITL = Column("between tokens p50 / p95, ms", "inter_token_latency_ms", shown=_p50_p95)


def article(result: Result) -> str:
    """The article's setting at equal lengths, one row per server."""
    return _article(result, "equal")


def mixed(result: Result) -> str:
    """The article's servers at uniform and geometric lengths."""
    return _article(result, "uniform", "geometric")


def _article(result: Result, *mixes: str) -> str:
    prefixes = [f"article/{mix}/" for mix in mixes]
    rows = result.measured(*prefixes)
    load, same_length = rows[0]["load"], mixes == ("equal",)
    first = [SERVER, WEIGHTS, _memory(rows)] if same_length else [LENGTHS, SERVER]
    new = f"; new tokens: {lengths(load)}" if same_length else ""
    return table(
        [*first, REQUESTS, LATENCY, REQUESTS_RATE, TOKENS, _speed_up(rows), BATCH, ROWS, LIMIT, OF_LIMIT],
        rows,
        [
            f"Load: {load['concurrency']} requests at a time{new}; greedy; warm-up not counted.",
            WINDOW,
            *conditions(result, rows, *prefixes),
        ],
    )


def peers(result: Result) -> str:
    """This server and the baselines in a closed loop."""
    rows = result.measured("peers/closed/")
    users = sorted({row["load"]["concurrency"] for row in rows})
    first = [LENGTHS, SERVER, WEIGHTS, _memory(rows), REQUESTS, LATENCY, TTFT, ITL]
    return table(
        [*first, REQUESTS_RATE, TOKENS, LIMIT, OF_LIMIT],
        rows,
        [
            f"Load: {', '.join(map(str, users))} users, each sends its next request when the previous one is answered; "
            "greedy; warm-up not counted.",
            f"{WINDOW} Tokens count on arrival: those of an unstreamed answer with the answer.",
            *conditions(result, rows, "peers/closed/"),
        ],
    )


def by_users(result: Result) -> str:
    """Tokens/s of every server at each number of users, the fastest first, at uniform and geometric lengths."""
    rows = result.measured("peers/closed/", "users/")
    mixes = ("uniform", "geometric")
    rates = {(row["server"], row["load"]["mix"], row["load"]["concurrency"]): row["tokens_per_second"] for row in rows}
    users = sorted({row["load"]["concurrency"] for row in rows})

    def column(mix: str, many: int) -> Column:
        def rate(row: Row) -> float | None:
            return rates.get((row["server"], mix, many))

        return Column(f"{many} user{'' if many == 1 else 's'}, {mix}", rate)

    # A server's first measurement is the default users'.
    servers = {row["server"]: row for row in reversed(rows)}.values()
    fastest_first = sorted(servers, key=lambda row: -row["tokens_per_second"])
    return table(
        [Column("tokens/s", label, right=False), *(column(mix, many) for mix in mixes for many in users)],
        fastest_first,
        [
            f"Closed loop; new tokens: {' and '.join(mixes)}, mean {rows[0]['load']['mean_output_tokens']:.0f}; "
            "greedy. Every server decodes at most 32 requests at a time; the others wait.",
            *_decode_steps(rows),
            *_steal(rows),
            *result.missing("peers/closed/", "users/"),
            result.origin(),
        ],
    )


def large(result: Result) -> str:
    """Our server and vLLM with a larger model."""
    rows = result.measured("large/")
    users = Column("users", "load/concurrency", shown=str)
    first = [users, SERVER, WEIGHTS, _memory(rows), REQUESTS, LATENCY, TTFT, ITL]
    return table(
        [*first, TOKENS, LIMIT, OF_LIMIT],
        rows,
        [
            f"{rows[0]['model']}; new tokens: {lengths(rows[0]['load'])}; closed loop; greedy; warm-up not counted.",
            *conditions(result, rows, "large/"),
        ],
    )


def formats(result: Result) -> str:
    """One model's weights in the formats of checkpoints, by server."""
    rows = result.measured("formats/")
    by_users = sorted(rows, key=lambda row: int(row["load"]["concurrency"]))
    return table(
        [Column("users", "load/concurrency", shown=str), SERVER, WEIGHTS, _memory(rows), REQUESTS, TTFT, ITL, TOKENS],
        by_users,
        [
            f"{rows[0]['model']}; new tokens: {lengths(rows[0]['load'])}; closed loop; greedy; warm-up not counted.",
            *_decode_steps(rows),
            *_steal(rows),
            *result.missing("formats/"),
            result.origin(),
        ],
    )


def quality(result: Result) -> str:
    """The unquantized weights and each quantization's distance from them."""
    rows, settings = result.measured(""), result.content["settings"]

    def loss(difference: Row) -> str:
        return f"{difference['mean']:+.5f} ± {difference['standard_error']:.5f}"

    def divergence(nats: Row) -> str:
        return several(nats["mean"], nats["p99"])

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
        rows,
        [
            f"On {text}: {settings['tokens']:,} predicted tokens in rows of at most {settings['context']}; ± is one "
            "standard error.",
            result.origin(),
        ],
    )


def summary(result: Result) -> str:
    """Return the tables that a run of `make bench` ends with."""
    made: list[str] = []
    for make in (article, mixed, peers, by_users, large):
        with suppress(NotMeasuredError):
            made.append(make(result))
    return "\n\n".join(made)


def _memory(rows: Rows) -> Column:
    on_gpu = any(at(row, "memory/kind") == "VRAM" for row in rows)
    title = "VRAM in use on the device" if on_gpu else "memory of the processes (PSS)"
    return Column(f"{title}, MiB", "memory/process_mib", shown="{:,.0f}".format)


def _speed_up(rows: Rows) -> Column:
    """Tokens/s over the naive server's at the same lengths: the one of BASELINES that was measured at most mixes."""
    chosen = max(([row for row in rows if row["server"] == server] for server in BASELINES), key=len)
    base = {row["load"]["mix"]: row["tokens_per_second"] for row in chosen}

    def cell(row: Row) -> str | None:
        mix = row["load"]["mix"]
        return f"{figure(row['tokens_per_second'] / base[mix])} ×" if mix in base else None

    return Column(f"over {chosen[0]['title']}" if chosen else "", cell)


def conditions(result: Result, rows: Rows, *prefixes: str) -> list[str]:
    """Return the notes beneath servers under load: the limit, steal time, what did not run, and the origin."""
    bounds: dict[str, dict[str, None]] = {}
    for row in rows:
        if "limit" in row:
            bounds.setdefault(row["limit"]["bound_by"], {})[row["title"]] = None
    by = "; ".join(f"{bound}: {', '.join(titles)}" for bound, titles in bounds.items())
    limit = f"The limit is what this device's measured bandwidth and matrix rate allow for the same load. Set by {by}."
    rates = _rates(result, rows) if prefixes[0].startswith("article/") else []
    missing = result.missing(*prefixes)
    return [*([limit] if bounds else []), *_decode_steps(rows), *rates, *_steal(rows), *missing, result.origin()]


def _decode_steps(rows: Rows) -> list[str]:
    """How our INT8 is computed: which instructions it has differs by machine."""
    steps = {row["title"]: at(row, "settings/decode_steps") for row in rows if row["weights"] == "INT8"}
    ours = sorted(f"{title}: {how}" for title, how in steps.items() if how is not None)
    return [f"Decode steps, {'; '.join(ours)}."] if ours else []


def _rates(result: Result, rows: Rows) -> list[str]:
    """The measured rates behind the limit; whether FP16 is slower than FP32 on this device."""
    rates = DeviceRates.from_json(result.content["rates"])
    wide, narrow = rates.operations.get("fp32"), rates.operations.get("fp16")
    slower = []
    if any(row["weights"] == "FP16" for row in rows) and wide is not None and narrow is not None and narrow < wide:
        by_format = "; ".join(f"{kind.upper()} {figure(rate / 1e9)}" for kind, rate in rates.operations.items())
        slower = [
            f"FP16 products are {figure(wide / narrow)} × slower than FP32 on this device, so FP16 rows compare number "
            f"formats as well as servers. 10^9 operations/s: {by_format}."
        ]
    return [*slower, f"Measured rates: {rates.describe()}."]


def _steal(rows: Rows) -> list[str]:
    shares = [(row["stolen_share"], row["title"]) for row in rows if "stolen_share" in row]
    most, title = max(shares, default=(0.0, ""))
    if most < MIN_STEAL:
        return []
    mean = sum(share for share, _ in shares) / len(shares)
    return [f"Steal time: {percent(mean)} of the processors' time in the mean; at most {percent(most)}, with {title}."]

"""The tables of README.md and docs/benchmarks.md. Each raises NotMeasuredError if a result has nothing for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise

from perf.report.results import NotMeasuredError, Part, Result, Row
from perf.report.text import Column, Table, at, figure, percent, several, table, terminal
from perf.roofline.rates import DeviceRates

LEAST_STEAL = 0.005
"""The smallest share of steal time that is mentioned."""
FEWEST_FOR_P99 = 100
"""With fewer requests the 99th percentile is the maximum, and the column says max."""
WINDOW = (
    "Throughput is the steady state's: from the first request after the warm-up to the first answer after the last "
    "request was sent; requests/s is tokens/s over the mean length. Latencies cover all measured requests, including "
    "those answered after the steady state."
)
BASELINES = ("naive_fp32", "naive_fp16")
"""What the others are compared with: the first that was measured. FP16 alone would compare number formats on a CPU."""
RUNS = {
    "server": "through Triton",
    "engine": "the bare engine",
    "slot_forward": "its passes alone, through the model runner",
    "forward": "the same passes through transformers' forward",
}
"""The account's runs, each with less around the same computation than the one before."""
LEAST_SHARE = 0.01
"""Parts with a smaller share of their whole are left out of the table."""
DECODING = ("graph/", "decode/", "stock_engine/", "stock/")
"""First parts of the keys of a GPU run's waves, in the order of the table."""
_WHOLES = (
    "Three wholes, not comparable with each other. Bare engine: the seconds of one run of all requests in one "
    "process without a server, with the stopwatch on. Mean request: the mean seconds of one request at its client, "
    "in the server's last run. Cores: the core seconds of that run, all cores together.",
    "In the mean request, tokenization is the time measured in the bare engine's run; the rest is what no counter "
    "covers: the client, HTTP, JSON and Triton's IPC.",
)
_PRODUCTS = {
    "fp16": "FP16",
    "bitsandbytes": "bitsandbytes",
    "bitsandbytes_6": "bitsandbytes, threshold 6",
    "w8a8": "rounded activations",
    "dequantize": "widened, then FP16",
    "engine_many": "ours, many rows",
    "fused": "ours, fused",
}

Rows = Sequence[Row]


def label(row: Row) -> str:
    """Return a server's title with the weights, unless the title names them."""
    title: str = row["title"]
    return title if row["weights"] in title else f"{title}, {row['weights']}"


def arrivals(load: Row) -> str:
    """Return how requests arrive, in words."""
    rate = load.get("rate_per_second")
    return f"{load['concurrency']} requests at a time" if rate is None else f"{figure(rate)} requests/s, Poisson"


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


def _medians(found: Row) -> str:
    return several(found["p50"], found["p95"])


SERVER = Column("server", _server, right=False)
WEIGHTS = Column("weights, MiB", _weights, right=False)
LENGTHS = Column("new tokens", lambda row: lengths(row["load"]), right=False)
REQUESTS = Column("requests", "requests", shown="{:,}".format)
REQUESTS_RATE = Column("requests/s", "requests_per_second")
TOKENS = Column("tokens/s", "tokens_per_second")
ROWS = Column("rows per step", "mean_rows")
BATCH = Column("Triton's batch", "mean_batch")
LIMIT = Column("limit, tokens/s", "limit/tokens_per_second")
OF_LIMIT = Column("of the limit", "limit/fraction", shown=percent)
TTFT = Column("first token p50 / p95, ms", "time_to_first_token_ms", shown=_medians)
ITL = Column("between tokens p50 / p95, ms", "inter_token_latency_ms", shown=_medians)
GOODPUT = Column("goodput, requests/s", "goodput/requests_per_second")
GOOD_SHARE = Column("within the objective", "goodput/share", shown=percent)
RATE = Column("sent, requests/s", "load/rate_per_second")


def article(result: Result) -> Table:
    """The article's setting at equal lengths, one row per server."""
    return _article(result, "equal")


def mixed(result: Result) -> Table:
    """The article's servers at uniform and geometric lengths."""
    return _article(result, "uniform", "geometric")


def _article(result: Result, *mixes: str) -> Table:
    prefixes = [f"article/{mix}/" for mix in mixes]
    rows = result.measured(*prefixes)
    load, one = rows[0]["load"], len(mixes) == 1
    first = [SERVER, WEIGHTS, _memory(rows)] if one else [LENGTHS, SERVER]
    new = f"; new tokens: {lengths(load)}" if one else ""
    return table(
        [*first, REQUESTS, _latency(rows), REQUESTS_RATE, TOKENS, _speed_up(rows), BATCH, ROWS, LIMIT, OF_LIMIT],
        rows,
        [
            f"Load: {load['concurrency']} requests at a time{new}; greedy; warm-up not counted.",
            WINDOW,
            *_conditions(result, rows, *prefixes),
        ],
    )


def sweep(result: Result) -> Table:
    """Tokens/s, p95 and share of the limit, a row per concurrency and a column per server."""
    rows = result.measured("sweep/")
    found = {(row["title"], row["load"]["concurrency"]): row for row in rows}
    requests = sorted({row["requests"] for row in rows})
    counted = " to ".join(str(count) for count in dict.fromkeys((requests[0], requests[-1])))

    def column(title: str) -> Column:
        def cell(concurrency: int) -> str | None:
            row = found.get((title, concurrency))
            if row is None:
                return None
            rate = several(row["tokens_per_second"], row["latency_ms"]["p95"] / 1e3)
            return f"{rate} / {percent(row['limit']['fraction'])}"

        return Column(f"{title}, tokens/s / p95 s / of the limit", cell)

    return table(
        [Column("concurrency", str), *(column(title) for title in dict.fromkeys(row["title"] for row in rows))],
        sorted({row["load"]["concurrency"] for row in rows}),
        [
            "Load: as many requests at a time as the row says; "
            f"new tokens: {lengths(rows[0]['load'])}; greedy; warm-up not counted.",
            f"{counted} requests were measured for each figure. {WINDOW}",
            *_conditions(result, rows, "sweep/"),
        ],
    )


def peers_closed(result: Result) -> Table:
    """This server and the baselines in a closed loop."""
    rows = result.measured("peers/closed/")
    users = sorted({row["load"]["concurrency"] for row in rows})
    first = [LENGTHS, SERVER, WEIGHTS, _memory(rows), REQUESTS, _latency(rows), TTFT, ITL]
    return table(
        [*first, REQUESTS_RATE, TOKENS, LIMIT, OF_LIMIT],
        rows,
        [
            f"Load: {', '.join(map(str, users))} users, each sends its next request when the previous one is answered; "
            "greedy; warm-up not counted.",
            f"{WINDOW} Tokens count on arrival: those of an unstreamed answer with the answer.",
            *_conditions(result, rows, "peers/closed/"),
        ],
    )


def by_users(result: Result) -> Table:
    """Tokens/s of every server at each number of users, the fastest first, at uniform and geometric lengths."""
    rows = result.measured("peers/closed/", "users/")
    mixes = ("uniform", "geometric")
    found = {(row["server"], row["load"]["mix"], row["load"]["concurrency"]): row["tokens_per_second"] for row in rows}
    users = sorted({row["load"]["concurrency"] for row in rows})

    def column(mix: str, many: int) -> Column:
        def rate(row: Row) -> float | None:
            return found.get((row["server"], mix, many))

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


def large(result: Result) -> Table:
    """Our server and vLLM with a larger model."""
    rows = result.measured("large/")
    users = Column("users", "load/concurrency", shown=str)
    first = [users, SERVER, WEIGHTS, _memory(rows), REQUESTS, _latency(rows), TTFT, ITL]
    return table(
        [*first, TOKENS, LIMIT, OF_LIMIT],
        rows,
        [
            f"{rows[0]['model']}; new tokens: {lengths(rows[0]['load'])}; closed loop; greedy; warm-up not counted.",
            *_conditions(result, rows, "large/"),
        ],
    )


def peers_poisson(result: Result) -> Table:
    """This server and the baselines under Poisson arrivals."""
    rows = result.measured("peers/poisson/")
    slo = rows[0]["goodput"]["slo"]
    first, inter = figure(slo["time_to_first_token_s"]), figure(1e3 * slo["inter_token_latency_s"])
    return table(
        [LENGTHS, RATE, SERVER, REQUESTS, TTFT, ITL, _latency(rows), TOKENS, GOODPUT, GOOD_SHARE],
        rows,
        [
            "Load: Poisson arrivals; greedy; warm-up not counted. Latencies count from when a request was due. Rates "
            "are over the whole run, from the first request due to the last answer.",
            f"Objective: the first token within {first} s and {inter} ms between tokens in the mean; an unstreamed "
            f"answer within {first} s and {inter} ms for each further token.",
            *_conditions(result, rows, "peers/poisson/"),
        ],
    )


def overhead(result: Result) -> Table:
    """Tokens/s of the same load with less and less around the forward pass."""
    account = result.section("overhead")
    speeds = {
        title: account["runs"][name]["tokens_per_second"] for name, title in RUNS.items() if name in account["runs"]
    }
    below, last, steps = dict(pairwise(speeds)), list(speeds)[-1], account["steps"]

    def over(title: str, other: str | None) -> str | None:
        return None if other is None or other == title else percent(speeds[title] / speeds[other])

    return table(
        [
            Column("the same load", str, right=False),
            Column("tokens/s", speeds.__getitem__),
            Column("of the next row's", lambda title: over(title, below.get(title))),
            Column("of the last row's", lambda title: over(title, last)),
        ],
        list(speeds),
        [
            f"Load: {account_load(account)}.",
            f"A decode step of {steps['rows']} rows in the bare engine takes {figure(steps['step_ms'])} ms, of which "
            f"{figure(steps['passes_ms'])} ms are the model's passes and {percent(steps['rest_share'])} are sampling, "
            "texts and rows. Reading weights and cached positions at the measured bandwidth takes "
            f"{figure(steps['limit_ms'])} ms: {percent(steps['share_of_limit'])} of that limit are reached.",
            result.origin(),
        ],
    )


def account_load(account: Row) -> str:
    """Return the load of an overhead account in words."""
    load = account["settings"]
    rows = f"{load['slots']} rows at a time, quantization {load['quantization']}"
    return f"{load['requests']} requests of {load['mix']} lengths, {rows}"


def where(result: Result) -> Table:
    """The parts of each whole of the account, indented below their parents."""
    account = result.section("overhead")
    parts = [Part(**part) for part in account["parts"]]
    shown = [part for part in parts if part.share >= LEAST_SHARE]
    left_out = f"{len(parts) - len(shown)} of {len(parts)} parts"
    load = f"Load: {account_load(account)}. Not shown, at less than {100 * LEAST_SHARE:.0f} % each: {left_out}."
    return parts_table(shown, [load, *_WHOLES, result.origin()])


def parts_table(parts: Sequence[Part], notes: Sequence[str]) -> Table:
    """The parts of an account, indented below their parents."""

    def name(part: Part) -> str:
        # No-break spaces: Markdown keeps them.
        return "\u00a0" * 4 * part.name.count("/") + part.name.rsplit("/", 1)[-1]

    return table(
        [
            Column("where the time goes", name, right=False),
            Column("time", lambda part: f"{figure(part.seconds)} {part.unit}"),
            Column("share of its whole", lambda part: percent(part.share)),
            Column("µs per token", lambda part: part.per_token_us),
        ],
        parts,
        notes,
    )


def quality(result: Result) -> Table:
    """The unquantized weights and each quantization's distance from them."""
    rows, settings = result.measured(""), result.content["settings"]

    def loss(one: Row) -> str:
        return f"{one['mean']:+.5f} ± {one['standard_error']:.5f}"

    def divergence(found: Row) -> str:
        return several(found["mean"], found["p99"])

    text = f"{settings['text']} {settings.get('python') or ''}".strip()
    return table(
        [
            Column("weights", "title", right=False),
            Column("MiB", "weights_mib"),
            Column("perplexity", "perplexity", shown="{:.3f}".format),
            Column("loss over the first row's, nats per token", "loss_difference", shown=loss),
            Column("KL divergence mean / p99, nats", "kl_nats", shown=divergence),
            Column("KL from weights only, head too", "kl_from_weights_only_nats", shown=divergence),
            Column("same best token", "top1_agreement", shown=percent),
        ],
        rows,
        [
            f"On {text}: {settings['tokens']:,} predicted tokens in rows of at most {settings['context']}; ± is one "
            "standard error.",
            result.origin(),
        ],
    )


def tuned(result: Result) -> list[Row]:
    """Return the points of a search that worked, by falling throughput, each with whether it is "recommended"."""
    chosen = at(result.content, "recommended/settings")
    points = [
        {**point, "recommended": point["settings"] == chosen}
        for point in result.section("points")
        if point.get("failure") is None
    ]
    if not points:
        raise NotMeasuredError(f"{result.file} has no point that worked")
    return sorted(points, key=lambda point: -point["tokens_per_second"])


def setting_texts(point: Row) -> dict[str, str]:
    """Return a point's settings as text, without those that the config doesn't have."""
    return {
        name: " ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
        for name, value in point["settings"].items()
        if value is not None
    }


def tune(result: Result) -> Table:
    """The Pareto front and the recommended point."""
    points = tuned(result)
    shown = [point for point in points if point["pareto"] or point["recommended"]]

    def setting(name: str) -> Column:
        return Column(name, lambda point: setting_texts(point).get(name))

    load = result.content["settings"]["load"]
    bound = f"a p95 of at most {figure(result.content['slo_p95_ms'] / 1e3)} s"
    verdict = f"None of them has {bound}."
    if any(point["recommended"] for point in shown):
        better = "what is better by more than two measurements of one point differ, if anything"
        verdict = f"Recommended for {bound}: {better}."
    return table(
        [
            *(setting(name) for name in setting_texts(shown[0])),
            Column("latency p50 / p95, s", lambda point: several(point["p50_ms"] / 1e3, point["p95_ms"] / 1e3)),
            TOKENS,
            Column("", lambda point: "recommended" if point["recommended"] else "", right=False),
        ],
        shown,
        [
            f"Load: {arrivals(load)}; new tokens: {lengths(load)}. {len(points)} points were measured; "
            f"of these no other one has as much throughput at as low a p95. {verdict}",
            result.origin(),
        ],
    )


def gpu_decoding(result: Result) -> Table:
    """Waves of rows that decode together: the engine's, and generate()'s."""
    rows, settings = result.measured(*DECODING), result.content["settings"]

    # As reported by the engine: kernels that were requested may not have been used.
    def what(row: Row) -> str:
        steps = row.get("steps")
        return "generate(), one batch" if steps is None else f"the engine, {steps.removeprefix('decode steps: ')}"

    return table(
        [
            Column("what", what, right=False),
            Column("weights", "title", right=False),
            Column("rows", "rows", shown=str),
            REQUESTS_RATE,
            TOKENS,
            Column("step p50, ms", "step_ms/p50"),
            Column("limit per step, ms", "step_limit_ms"),
            LIMIT,
            OF_LIMIT,
            Column("VRAM at most, MiB", "vram_mib"),
        ],
        rows,
        [
            f"Prompts of {settings['prompt_tokens']} tokens, {settings['output_tokens']} new ones; "
            "all rows of a wave begin and end together.",
            *result.missing(*DECODING),
            result.origin(),
        ],
    )


def gpu_products(result: Result) -> Table:
    """Each way to multiply with an 8-bit weight, a row per matrix and number of rows."""
    rows = result.measured("products/")

    def way(name: str, title: str) -> Column:
        return Column(title, lambda row: at(row, f"ways/{name}/graph_us") or at(row, f"ways/{name}/eager_us"))

    return table(
        [
            Column("matrix", lambda row: f"{row['outputs']} x {row['inputs']}", right=False),
            Column("rows", "rows", shown=str),
            *(way(name, title) for name, title in _PRODUCTS.items()),
            Column("reading it, INT8 / FP16", "bandwidth_us", shown=lambda us: several(us["int8"], us["fp16"])),
        ],
        rows,
        [
            "Microseconds per product, replayed as a CUDA graph where it can be captured, else launched from Python.",
            *result.missing("products/"),
            result.origin(),
        ],
    )


def summary(result: Result) -> str:
    """Return the tables that a run of `make bench` ends with, for a terminal."""
    titles: dict[str, Callable[[Result], Table]] = {
        "The article's setting": article,
        "The same at mixed lengths": mixed,
        "Baselines, closed loop": peers_closed,
        "Baselines, Poisson arrivals": peers_poisson,
        "By users": by_users,
        "A larger model": large,
    }
    found: list[str] = []
    for title, make in titles.items():
        with suppress(NotMeasuredError):
            found.append(f"{title}\n\n{terminal(make(result))}")
    return "\n\n".join(found)


def _memory(rows: Rows) -> Column:
    """The memory in use: the processes' own, or the device's."""
    on_gpu = any(at(row, "memory/kind") == "VRAM" for row in rows)
    title = "VRAM in use on the device" if on_gpu else "memory of the processes (PSS)"
    return Column(f"{title}, MiB", "memory/process_mib", shown="{:,.0f}".format)


def _latency(rows: Rows) -> Column:
    last = "max" if min(row["requests"] - row["errors"] for row in rows) < FEWEST_FOR_P99 else "p99"

    def cell(row: Row) -> str:
        return several(*(row["latency_ms"][name] / 1e3 for name in ("p50", "p95", last)))

    return Column(f"latency p50 / p95 / {last}, s", cell)


def _speed_up(rows: Rows) -> Column:
    """Tokens/s over the naive server's at the same lengths: the one of BASELINES that was measured at most mixes."""
    chosen = max(([row for row in rows if row["server"] == server] for server in BASELINES), key=len)
    base = {row["load"]["mix"]: row["tokens_per_second"] for row in chosen}

    def cell(row: Row) -> str | None:
        mix = row["load"]["mix"]
        return f"{figure(row['tokens_per_second'] / base[mix])} ×" if mix in base else None

    return Column(f"over {chosen[0]['title']}" if chosen else "", cell)


def _conditions(result: Result, rows: Rows, *prefixes: str) -> list[str]:
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
    # Results of before exact INT8 name the device alone.
    ours = sorted(f"{title}: {how}" for title, how in steps.items() if how not in (None, "on the CPU, launched"))
    return [f"Decode steps, {'; '.join(ours)}."] if ours else []


def _rates(result: Result, rows: Rows) -> list[str]:
    """The measured rates behind the limit; whether FP16 is slower than FP32 on this device."""
    found = result.content.get("rates")
    if found is None:
        return []
    rates = DeviceRates.from_json(found)
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
    if most < LEAST_STEAL:
        return []
    mean = sum(share for share, _ in shares) / len(shares)
    return [f"Steal time: {percent(mean)} of the processors' time in the mean; at most {percent(most)}, with {title}."]

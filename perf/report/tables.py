"""The tables of README.md and docs/benchmarks.md. Each takes a result and returns None if it has nothing to show."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from perf.load.summary import SLO
from perf.report.results import (
    Account,
    Aim,
    Divergence,
    Load,
    Measurement,
    Part,
    Percentiles,
    Product,
    Quality,
    QualitySettings,
    Result,
    TunePoint,
    Wave,
    WaveSettings,
    tuned,
)
from perf.report.text import Column, Table, figure, percent, several, table, terminal
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
DECODING = ("graph", "decode", "stock_engine", "stock")
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

Rows = Sequence[Measurement]


def article(result: Result) -> Table | None:
    """The article's setting at equal lengths, one row per server."""
    return _article(result, "equal")


def mixed(result: Result) -> Table | None:
    """The article's servers at uniform and geometric lengths."""
    return _article(result, "uniform", "geometric")


def _article(result: Result, *mixes: str) -> Table | None:
    rows = [row for mix in mixes for row in result.measured("article", mix)]
    if not rows:
        return None
    one = len(mixes) == 1
    first = [SERVER, _weights(rows), _memory(rows)] if one else [LENGTHS, SERVER]
    lengths = f"; new tokens: {rows[0].load.title}" if one else ""
    return table(
        [*first, REQUESTS, _latency(rows), REQUESTS_RATE, TOKENS, _speed_up(rows), BATCH, ROWS, LIMIT, OF_LIMIT],
        rows,
        [
            f"Load: {rows[0].load.concurrency} requests at a time{lengths}; greedy; warm-up not counted.",
            WINDOW,
            *_conditions(result, rows, *(("article", mix) for mix in mixes)),
        ],
    )


def sweep(result: Result) -> Table | None:
    """Tokens/s, p95 and share of the limit, a row per concurrency and a column per server."""
    rows = result.measured("sweep")
    if not rows:
        return None
    found = {(row.title, row.load.concurrency): row for row in rows}
    requests = sorted({row.requests for row in rows})
    counted = " to ".join(str(count) for count in dict.fromkeys((requests[0], requests[-1])))
    steps = sorted({row.load.concurrency for row in rows if row.load.concurrency is not None})
    what = "tokens/s / p95 s" + (" / of the limit" if any(row.limit is not None for row in rows) else "")

    def column(title: str) -> Column[int]:
        def cell(concurrency: int) -> str | None:
            row = found.get((title, concurrency))
            if row is None:
                return None
            rate = several(row.tokens_per_second, row.latency_ms.p95 / 1e3)
            return rate if row.limit is None else f"{rate} / {percent(row.limit.fraction)}"

        return Column(f"{title}, {what}", cell)

    return table(
        [Column("concurrency", str), *(column(title) for title in dict.fromkeys(row.title for row in rows))],
        steps,
        [
            "Load: as many requests at a time as the row says; "
            f"new tokens: {rows[0].load.title}; greedy; warm-up not counted.",
            f"{counted} requests were measured for each figure. {WINDOW}",
            *_conditions(result, rows, ["sweep"]),
        ],
    )


def peers_closed(result: Result) -> Table | None:
    """This server and the baselines in a closed loop."""
    rows = result.measured("peers", "closed")
    if not rows:
        return None
    users = sorted({row.load.concurrency for row in rows if row.load.concurrency is not None})
    first = [LENGTHS, SERVER, _weights(rows), _memory(rows), REQUESTS, _latency(rows), TTFT, ITL]
    return table(
        [*first, REQUESTS_RATE, TOKENS, LIMIT, OF_LIMIT],
        rows,
        [
            f"Load: {', '.join(map(str, users))} users, each sends its next request when the previous one is answered; "
            "greedy; warm-up not counted.",
            f"{WINDOW} Tokens count on arrival: those of an unstreamed answer with the answer.",
            *_conditions(result, rows, ["peers", "closed"]),
        ],
    )


def headline(result: Result) -> Table | None:
    """Tokens/s of every server at each number of users, the fastest first, at uniform lengths."""
    return _by_users(result, "uniform")


def by_users(result: Result) -> Table | None:
    """The same at uniform and geometric lengths."""
    return _by_users(result, "uniform", "geometric")


def _by_users(result: Result, *mixes: str) -> Table | None:
    rows = [*result.measured("peers", "closed"), *result.measured("users")]
    if not rows:
        return None
    found = {(row.server, row.load.mix, row.load.concurrency): row.tokens_per_second for row in rows}
    users = sorted({row.load.concurrency for row in rows if row.load.concurrency is not None})

    def column(mix: str, many: int) -> Column[Measurement]:
        lengths = f", {mix}" if len(mixes) > 1 else ""
        return Column(f"{many} user{'' if many == 1 else 's'}{lengths}", lambda row: found.get((row.server, mix, many)))

    # A server's first measurement is the default users'.
    servers = {row.server: row for row in reversed(rows)}.values()
    return table(
        [
            Column("tokens/s", lambda row: row.label, right=False),
            *(column(mix, many) for mix in mixes for many in users),
        ],
        sorted(servers, key=lambda row: -row.tokens_per_second),
        [
            f"Closed loop; new tokens: {' and '.join(mixes)}, mean {rows[0].load.mean_output_tokens:.0f}; greedy. "
            "Every server decodes at most 32 requests at a time; the others wait.",
            *_decode_steps(rows),
            *_steal(rows),
            *_missing(result, ["peers", "closed"], ["users"]),
            result.origin.line(),
        ],
    )


def large(result: Result) -> Table | None:
    """Our server and vLLM with a larger model."""
    rows = result.measured("large")
    if not rows:
        return None
    users = Column[Measurement]("users", lambda row: str(row.load.concurrency))
    first = [users, SERVER, _weights(rows), _memory(rows), REQUESTS, _latency(rows), TTFT, ITL]
    return table(
        [*first, TOKENS, LIMIT, OF_LIMIT],
        rows,
        [
            f"{rows[0].model}; new tokens: {rows[0].load.title}; closed loop; greedy; warm-up not counted.",
            *_conditions(result, rows, ["large"]),
        ],
    )


def peers_poisson(result: Result) -> Table | None:
    """This server and the baselines under Poisson arrivals."""
    rows = result.measured("peers", "poisson")
    if not rows:
        return None

    def objective(slo: SLO) -> str:
        first, inter = figure(slo.time_to_first_token_s), figure(1e3 * slo.inter_token_latency_s)
        return (
            f"Objective: the first token within {first} s and {inter} ms between tokens in the mean; an unstreamed "
            f"answer within {first} s and {inter} ms for each further token."
        )

    return table(
        [LENGTHS, RATE, SERVER, REQUESTS, TTFT, ITL, _latency(rows), TOKENS, GOODPUT, GOOD_SHARE],
        rows,
        [
            "Load: Poisson arrivals; greedy; warm-up not counted. Latencies count from when a request was due. Rates "
            "are over the whole run, from the first request due to the last answer.",
            *dict.fromkeys(objective(row.goodput.slo) for row in rows if row.goodput is not None),
            *_conditions(result, rows, ["peers", "poisson"]),
        ],
    )


def overhead(result: Result) -> Table | None:
    """Tokens/s of the same load with less and less around the forward pass."""
    account = result.section("overhead", Account)
    if account is None:
        return None
    speeds = {title: account.runs[name].tokens_per_second for name, title in RUNS.items() if name in account.runs}
    below, last = dict(pairwise(speeds)), list(speeds)[-1]

    def over(title: str, other: str | None) -> str | None:
        return None if other is None or other == title else percent(speeds[title] / speeds[other])

    return table(
        [
            Column[str]("the same load", str, right=False),
            Column[str]("tokens/s", lambda title: speeds[title]),
            Column[str]("of the next row's", lambda title: over(title, below.get(title))),
            Column[str]("of the last row's", lambda title: over(title, last)),
        ],
        list(speeds),
        [f"Load: {account.load}.", *_full_steps(account), result.origin.line()],
    )


def _full_steps(account: Account) -> list[str]:
    steps = account.steps
    if steps is None:
        return []
    return [
        f"A decode step of {steps.rows} rows in the bare engine takes {figure(steps.step_ms)} ms, of which "
        f"{figure(steps.passes_ms)} ms are the model's passes and {percent(steps.rest_share)} are sampling, texts and "
        f"rows. Reading weights and cached positions at the measured bandwidth takes {figure(steps.limit_ms)} ms: "
        f"{percent(steps.share_of_limit)} of that limit are reached."
    ]


def where(result: Result) -> Table | None:
    """The parts of each whole of the account, indented below their parents."""
    account = result.section("overhead", Account)
    if account is None:
        return None
    shown = [part for part in account.parts if part.share >= LEAST_SHARE]
    left_out = f"{len(account.parts) - len(shown)} of {len(account.parts)} parts"
    load = f"Load: {account.load}. Not shown, at less than {100 * LEAST_SHARE:.0f} % each: {left_out}."
    return parts_table(shown, [load, *_WHOLES, result.origin.line()])


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


def quality(result: Result) -> Table | None:
    """The unquantized weights and each quantization's distance from them."""
    rows, settings = result.rows(Quality), result.section("settings", QualitySettings)
    if not rows or settings is None:
        return None

    def loss(row: Quality) -> str | None:
        one = row.loss_difference
        return None if one is None else f"{one.mean:+.5f} ± {one.standard_error:.5f}"

    def divergence(found: Divergence | None) -> str | None:
        return None if found is None else several(found.mean, found.p99)

    text = settings.text + ("" if settings.python is None else f" {settings.python}")
    return table(
        [
            Column("weights", lambda row: row.title, right=False),
            Column("MiB", lambda row: row.weights_mib),
            Column("perplexity", lambda row: f"{row.perplexity:.3f}"),
            Column("loss over the first row's, nats per token", loss),
            Column("KL divergence mean / p99, nats", lambda row: divergence(row.kl_nats)),
            Column("KL from weights only, head too", lambda row: divergence(row.kl_from_weights_only_nats)),
            Column("same best token", lambda row: row.top1_agreement and percent(row.top1_agreement)),
        ],
        rows,
        [
            f"On {text}: {settings.tokens:,} predicted tokens in rows of at most {settings.context}; ± is one standard "
            "error.",
            result.origin.line(),
        ],
    )


def tune(result: Result) -> Table | None:
    """The Pareto front and the recommended point."""
    found = tuned(result)
    shown = [] if found is None else [point for point in found.points if point.pareto or point.recommended]
    if found is None or not shown:
        return None

    def setting(name: str) -> Column[TunePoint]:
        return Column(name, lambda point: point.texts.get(name))

    bound = f"a p95 of at most {figure(found.bound)} s"
    verdict = f"None of them has {bound}."
    if any(point.recommended for point in shown):
        better = "what is better by more than two measurements of one point differ, if anything"
        verdict = f"Recommended for {bound}: {better}."
    return table(
        [
            *(setting(name) for name in shown[0].texts),
            Column("latency p50 / p95, s", lambda point: several(point.p50_ms / 1e3, point.p95_ms / 1e3)),
            Column("tokens/s", lambda point: point.tokens_per_second),
            Column("", lambda point: "recommended" if point.recommended else "", right=False),
        ],
        shown,
        [
            f"Load: {arrivals(found.load)}; new tokens: {found.load.title}. {len(found.points)} points were measured; "
            f"of these no other one has as much throughput at as low a p95. {verdict}",
            result.origin.line(),
        ],
    )


def gpu_verdict(result: Result) -> Table | None:
    """Every aim beside its figure."""
    aims = result.section("verdict", list[Aim])
    if aims is None:
        return None
    return table(
        [
            Column("aim", lambda row: row.aim, right=False),
            Column("bound", lambda row: row.bound),
            Column("measured", lambda row: row.measured),
            Column("met", lambda row: None if row.met is None else ("yes" if row.met else "no"), right=False),
            Column("measured by", lambda row: row.measured_by, right=False),
        ],
        aims,
        [result.origin.line()],
    )


def gpu_decoding(result: Result) -> Table | None:
    """Waves of rows that decode together: the engine's, and generate()'s."""
    rows = [wave for part in DECODING for wave in result.rows(Wave, part)]
    lengths = result.section("settings", WaveSettings) if rows else None
    if lengths is None:
        return None

    # As reported by the engine: kernels that were requested may not have been used.
    def what(row: Wave) -> str:
        steps = row.steps
        return "generate(), one batch" if steps is None else f"the engine, {steps.removeprefix('decode steps: ')}"

    return table(
        [
            Column("what", what, right=False),
            Column("weights", lambda row: row.title, right=False),
            Column("rows", lambda row: str(row.rows)),
            Column("requests/s", lambda row: row.requests_per_second),
            Column("tokens/s", lambda row: row.tokens_per_second),
            Column("step p50, ms", lambda row: None if row.step_ms is None else row.step_ms.p50),
            Column("limit per step, ms", lambda row: row.step_limit_ms),
            Column("limit, tokens/s", lambda row: row.limit.tokens_per_second),
            Column("of the limit", lambda row: percent(row.limit.fraction)),
            Column("VRAM at most, MiB", lambda row: row.vram_mib),
        ],
        rows,
        [
            f"Prompts of {lengths.prompt_tokens} tokens, {lengths.output_tokens} new ones; "
            "all rows of a wave begin and end together.",
            *_missing(result, *([part] for part in DECODING)),
            result.origin.line(),
        ],
    )


def gpu_products(result: Result) -> Table | None:
    """Each way to multiply with an 8-bit weight, a row per matrix and number of rows."""
    rows = result.rows(Product, "products")
    if not rows:
        return None

    def way(name: str, title: str) -> Column[Product]:
        def cell(row: Product) -> float | None:
            times = row.ways.get(name)
            if times is None or times.failed is not None:
                return None
            return times.eager_us if times.graph_us is None else times.graph_us

        return Column(title, cell)

    return table(
        [
            Column("matrix", lambda row: f"{row.outputs} x {row.inputs}", right=False),
            Column("rows", lambda row: str(row.rows)),
            *(way(name, title) for name, title in _PRODUCTS.items()),
            Column("reading it, INT8 / FP16", lambda row: several(row.int8_bandwidth_us, row.fp16_bandwidth_us)),
        ],
        rows,
        [
            "Microseconds per product, replayed as a CUDA graph where it can be captured, else launched from Python.",
            *_missing(result, ["products"]),
            result.origin.line(),
        ],
    )


def summary(result: Result) -> str:
    """Return the tables that a run of `make bench` ends with, for a terminal."""
    titles = {
        "The article's setting": article(result),
        "The same at mixed lengths": mixed(result),
        "Baselines, closed loop": peers_closed(result),
        "Baselines, Poisson arrivals": peers_poisson(result),
        "By users": by_users(result),
        "A larger model": large(result),
    }
    return "\n\n".join(f"{title}\n\n{terminal(one)}" for title, one in titles.items() if one is not None)


def arrivals(load: Load) -> str:
    """Return how requests arrive, in words."""
    if load.rate_per_second is not None:
        return f"{figure(load.rate_per_second)} requests/s, Poisson"
    return f"{load.concurrency} requests at a time"


def _server(row: Measurement) -> str:
    return row.title + (f" ({row.errors} error{'s' if row.errors > 1 else ''})" if row.errors else "")


def _medians(found: Percentiles | None) -> str | None:
    return None if found is None else several(found.p50, found.p95)


SERVER = Column("server", _server, right=False)
LENGTHS = Column[Measurement]("new tokens", lambda row: row.load.title, right=False)
REQUESTS = Column[Measurement]("requests", lambda row: f"{row.requests:,}")
REQUESTS_RATE = Column[Measurement]("requests/s", lambda row: row.requests_per_second)
TOKENS = Column[Measurement]("tokens/s", lambda row: row.tokens_per_second)
ROWS = Column[Measurement]("rows per step", lambda row: row.mean_rows)
BATCH = Column[Measurement]("Triton's batch", lambda row: row.mean_batch)
LIMIT = Column[Measurement]("limit, tokens/s", lambda row: None if row.limit is None else row.limit.tokens_per_second)
OF_LIMIT = Column[Measurement]("of the limit", lambda row: None if row.limit is None else percent(row.limit.fraction))
TTFT = Column[Measurement]("first token p50 / p95, ms", lambda row: _medians(row.time_to_first_token_ms))
ITL = Column[Measurement]("between tokens p50 / p95, ms", lambda row: _medians(row.inter_token_latency_ms))
GOODPUT = Column[Measurement](
    "goodput, requests/s", lambda row: None if row.goodput is None else row.goodput.requests_per_second
)
GOOD_SHARE = Column[Measurement](
    "within the objective", lambda row: None if row.goodput is None else percent(row.goodput.share)
)
RATE = Column[Measurement]("sent, requests/s", lambda row: row.load.rate_per_second)


def _weights(rows: Rows) -> Column[Measurement]:
    """The format of the linear layers' weights, with their MiB where known."""
    sizes = {row.server: row.memory.weights_mib for row in rows if row.memory is not None}

    def cell(row: Measurement) -> str:
        size = sizes.get(row.server)
        return row.weights if size is None else f"{row.weights}, {figure(size)}"

    known = any(size is not None for size in sizes.values())
    return Column("weights, MiB" if known else "weights", cell, right=False)


def _memory(rows: Rows) -> Column[Measurement]:
    """The memory in use: the processes' own, or the device's."""
    kinds = sorted({row.memory.kind for row in rows if row.memory is not None})
    titles = {"PSS": "memory of the processes (PSS)", "VRAM": "VRAM in use on the device"}

    def cell(row: Measurement) -> str | None:
        if row.memory is None or row.memory.process_mib is None:
            return None
        return f"{row.memory.process_mib:,.0f}" + ("" if len(kinds) == 1 else f" {row.memory.kind}")

    return Column(f"{titles.get(kinds[0], kinds[0]) if len(kinds) == 1 else 'memory'}, MiB", cell)


def _latency(rows: Rows) -> Column[Measurement]:
    last = "max" if min(row.requests - row.errors for row in rows) < FEWEST_FOR_P99 else "p99"

    def cell(row: Measurement) -> str:
        found = row.latency_ms
        return several(found.p50 / 1e3, found.p95 / 1e3, (found.max if last == "max" else found.p99) / 1e3)

    return Column(f"latency p50 / p95 / {last}, s", cell)


def _speed_up(rows: Rows) -> Column[Measurement]:
    """Tokens/s over the naive server's at the same lengths: the one of BASELINES that was measured at most mixes."""
    chosen = max(([row for row in rows if row.server == server] for server in BASELINES), key=len)
    base = {row.load.mix: row.tokens_per_second for row in chosen}

    def cell(row: Measurement) -> str | None:
        return f"{figure(row.tokens_per_second / base[row.load.mix])} ×" if row.load.mix in base else None

    return Column(f"over {chosen[0].title}" if chosen else "", cell)


def _conditions(result: Result, rows: Rows, *prefixes: Sequence[str]) -> list[str]:
    """Return the notes beneath servers under load: the limit, steal time, what did not run, and the origin."""
    bounds: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.limit is not None:
            bounds.setdefault(row.limit.bound_by, {})[row.title] = None
    by = "; ".join(f"{bound}: {', '.join(titles)}" for bound, titles in bounds.items())
    limit = f"The limit is what this device's measured bandwidth and matrix rate allow for the same load. Set by {by}."
    rates = _rates(result, rows) if prefixes[0][0] == "article" else []
    missing = _missing(result, *prefixes)
    return [*([limit] if bounds else []), *_decode_steps(rows), *rates, *_steal(rows), *missing, result.origin.line()]


def _decode_steps(rows: Rows) -> list[str]:
    """How our INT8 is computed: which instructions it has differs by machine."""
    # Results of before exact INT8 name the device alone.
    telling = [row for row in rows if row.decode_steps not in (None, "on the CPU, launched")]
    ours = {f"{row.title}: {row.decode_steps}" for row in telling if row.weights == "INT8"}
    return [f"Decode steps, {'; '.join(sorted(ours))}."] if ours else []


def _rates(result: Result, rows: Rows) -> list[str]:
    """The measured rates behind the limit; whether FP16 is slower than FP32 on this device."""
    rates = result.section("rates", DeviceRates)
    if rates is None:
        return []
    wide, narrow = rates.operations.get("fp32"), rates.operations.get("fp16")
    slower = []
    if any(row.weights == "FP16" for row in rows) and wide is not None and narrow is not None and narrow < wide:
        by_format = "; ".join(f"{kind.upper()} {figure(rate / 1e9)}" for kind, rate in rates.operations.items())
        slower = [
            f"FP16 products are {figure(wide / narrow)} × slower than FP32 on this device, so FP16 rows compare number "
            f"formats as well as servers. 10^9 operations/s: {by_format}."
        ]
    return [*slower, f"Measured rates: {rates.describe()}."]


def _steal(rows: Rows) -> list[str]:
    shares = [(row.stolen_share, row.title) for row in rows if row.stolen_share is not None]
    most, title = max(shares, default=(0.0, ""))
    if most < LEAST_STEAL:
        return []
    mean = sum(share for share, _ in shares) / len(shares)
    return [f"Steal time: {percent(mean)} of the processors' time in the mean; at most {percent(most)}, with {title}."]


def _missing(result: Result, *prefixes: Sequence[str]) -> list[str]:
    each = dict.fromkeys(one for prefix in prefixes for one in result.missing(*prefix))
    return [f"Not run: {'; '.join(each)}."] if each else []

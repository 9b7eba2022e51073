"""The batching settings with the highest throughput whose p95 latency meets a bound (`make tune SLO_P95_MS=2000`).

More slots raise throughput, because a decode step reads the weights once for all rows, and raise latency, because a
step of more rows takes longer; preferred sizes and queue delay decide how full batches start, the prefill bound how
long a prompt may hold up the running rows. Where the best trade lies depends on the machine and the load, so points
around the present config are measured, each on a server of its own. Prints the recommended config, ready to save;
writes one JSON file with every measurement.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from llama_engine.errors import EngineError
from llama_engine.settings import ENVIRONMENT_PREFIX
from triton_local.errors import LauncherError
from triton_local.repository import DEFAULT_VARIANT, ModelRepository, resolve_model

from perf import environment
from perf.checkpoint import default_checkpoint
from perf.command import CORES, count, given, make_command, model_name, positive
from perf.course import Budget
from perf.load.arrivals import Closed, Poisson
from perf.load.generator import LoadError
from perf.load.summary import describe
from perf.report.results import NotMeasuredError, read
from perf.report.tables import tune
from perf.report.text import terminal
from perf.results_file import Results
from perf.tune.config import ConfigError, config_file, edited, knobs_of, parsed
from perf.tune.measuring import Trial
from perf.tune.points import Knobs, Noise, Point, pareto, recommended
from perf.tune.search import Search
from perf.workload import MEAN_OUTPUT, MIXES, PROMPT_TOKENS, warm_and_measured

MET, NOT_MET, FAILED, INTERRUPTED = 0, 1, 2, 130
TUNED = "tuned"
"""The variant name to save the recommended config under."""

_OPEN_REQUESTS, _OPEN_WARMUP = 128, 16


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune; return the exit code. An error is one line on stderr."""
    options = parse(arguments, os.environ)
    try:
        return _tune(options)
    except KeyboardInterrupt:
        print("\ntune: interrupted; --resume continues with what was measured", file=sys.stderr)
        return INTERRUPTED
    except (ConfigError, EngineError, LauncherError, LoadError, OSError, ValueError) as error:
        print(f"tune: {error}", file=sys.stderr)
        return FAILED


def parse(arguments: Sequence[str] | None, environ: Mapping[str, str]) -> argparse.Namespace:
    """Parse the command line, with the `command` that repeats it; an error is one line on stderr and exit code 2."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.tune",
        description="Recommend batching settings: the highest throughput whose p95 latency meets the bound.",
        epilog="Exit code: 0 with a recommendation, 1 if nothing meets the bound, 2 if something can't be used or run.",
    )
    add = parser.add_argument
    add("--slo-p95-ms", type=positive, required=True, metavar="MS", help="bound on p95 latency")
    add("--mix", choices=MIXES, default="uniform", help="of output lengths (uniform)")
    arrivals = parser.add_mutually_exclusive_group()
    arrivals.add_argument("--concurrency", type=count, default=32, metavar="N", help="closed loop (32)")
    arrivals.add_argument("--rate", type=positive, metavar="R", help="Poisson, requests/s")
    add("--requests", type=count, metavar="N", help="measured per point (4 x concurrency, or 128)")
    add("--output-tokens", type=count, default=MEAN_OUTPUT, metavar="N", help="mean (200)")
    add("--variant", default=DEFAULT_VARIANT, metavar="NAME", help="the config to start from (default)")
    add("--model", help="checkpoint, a folder or a hub id (the benchmarks' own, of random weights)")
    add("--threads", type=count, default=CORES, metavar="N", help=f"per server, on a CPU ({CORES})")
    add("--budget", type=positive, default=30.0, metavar="MINUTES", help="in all (30)")
    add("--resume", action="store_true", help="continue with the measurements in the output")
    add("--output", type=Path, default=Path("perf/results/tune.json"), metavar="FILE", help="(perf/results/tune.json)")
    options = parser.parse_args(arguments)
    for name in sorted(environ):
        if name.startswith(ENVIRONMENT_PREFIX):
            # It would override the config in every server, and be missing from the recommended one.
            parser.error(f"the environment variable {name} is set; unset it: the config is tuned (--model for one)")
    variables = {"SLO_P95_MS": f"{options.slo_p95_ms:g}", "BUDGET": f"{options.budget:g}"}
    if options.model is not None:
        variables["MODEL"] = model_name(options.model)
    others = ["mix", "concurrency", "rate", "requests", "output_tokens", "variant", "threads"]
    options.command = make_command("tune", variables, given(parser, options, others))
    return options


def trial(options: argparse.Namespace, checkpoint: str) -> Trial:
    """Return what every point is measured with. Raises UnknownVariantError."""
    repository = ModelRepository.at(environment.ROOT / "model_repository")
    repository.check_variant(options.variant)
    closed, users = options.rate is None, options.concurrency
    arrivals = Closed(users) if closed else Poisson(options.rate, seed=0)
    requests = options.requests or (4 * users if closed else _OPEN_REQUESTS)
    warmup, mean = users if closed else _OPEN_WARMUP, options.output_tokens
    return Trial(
        variant=options.variant,
        text=config_file(repository.path, options.variant).read_text(),
        model=checkpoint,
        threads=options.threads,
        load=describe(options.mix, arrivals, requests, warmup, PROMPT_TOKENS, mean),
        arrivals=arrivals,
        requests=warm_and_measured(Path(checkpoint), options.mix, warmup, requests, mean),
        warmup=warmup,
    )


def _tune(options: argparse.Namespace) -> int:
    budget = Budget(60 * options.budget)
    budget.say("preparing the checkpoint and the load")
    under = trial(options, str(default_checkpoint()) if options.model is None else resolve_model(options.model))
    present = knobs_of(parsed(under.text))
    # Before any time is spent: the present settings can be written back.
    edited(under.text, present)
    settings = {
        "variant": under.variant,
        "config_sha256": hashlib.sha256(under.text.encode()).hexdigest()[:12],
        "model": model_name(under.model),
        "threads": under.threads,
        "load": under.load,
    }
    results = Results(options.output, "tune", settings, options.resume)
    results.section("command", options.command)

    def add(knobs: Knobs, run: int) -> None:
        results.add(knobs.key(run), under.measure(knobs))

    most = min(options.concurrency, len(under.requests) - under.warmup) if options.rate is None else None
    search = Search(present, options.slo_p95_ms, most, results.measurements, add, budget)
    search.run()
    chosen = recommended(search.points, options.slo_p95_ms, search.noise, present)
    config = None if chosen is None else with_origin(under, options.slo_p95_ms, chosen)
    for name, content in sections(search.points, search.noise, options.slo_p95_ms, chosen, config).items():
        results.section(name, content)
    results.finish()
    with suppress(NotMeasuredError):  # no point worked
        print(f"\n{terminal(tune(read(options.output)))}")
    print(f"\n{conclusion(search.points, search.noise, options.slo_p95_ms, chosen)}\nWritten to {options.output}.")
    if config is None:
        return NOT_MET
    serve = f"make serve VARIANT={TUNED}{'' if options.model is None else f' MODEL={options.model}'}"
    print(f"\n{config}\nSave it as model_repository/llama/configs/{TUNED}.pbtxt and serve it: {serve}")
    return MET


def with_origin(under: Trial, slo_p95_ms: float, chosen: Point) -> str:
    """Return the recommended config, with comments that state what it was chosen for."""
    load = ", ".join(f"{name} {value}" for name, value in under.load.items() if value is not None)
    return (
        f"# Tuned from the config {under.variant!r} for a p95 of at most {slo_p95_ms:g} ms,\n"
        f"# measured with {load}:\n# {chosen}, on {environment.device()}.\n"
    ) + edited(under.text, chosen.knobs)


def sections(
    points: Sequence[Point], noise: Noise, slo_p95_ms: float, chosen: Point | None, config: str | None
) -> dict[str, object]:
    """Return the result file's sections beside the measurements."""
    front = pareto(points)
    figures = []
    for point in points:
        latency = {} if point.failure else point.latency_ms
        figures.append(
            {
                "settings": asdict(point.knobs),
                "repeats": len(point.runs),
                "tokens_per_second": None if point.failure else round(point.tokens_per_second, 2),
                "p50_ms": latency.get("p50"),
                "p95_ms": latency.get("p95"),
                "pareto": point in front,
                "failure": point.failure or None,
            }
        )
    return {
        "slo_p95_ms": slo_p95_ms,
        # JSON has no infinity.
        "noise": None if math.isinf(noise.throughput) else noise._asdict(),
        "points": figures,
        "recommended": None if chosen is None else {"settings": asdict(chosen.knobs), "config": config},
    }


def conclusion(points: Sequence[Point], noise: Noise, slo_p95_ms: float, chosen: Point | None) -> str:
    """Return the recommendation, or why there is none, with its figures and the noise."""
    differ = (
        f"two measurements of one point differ by up to {noise.throughput:.1%} in tokens/s and {noise.p95:.1%} in p95"
    )
    known = "nothing was measured twice" if math.isinf(noise.throughput) else differ
    if chosen is not None:
        return f"Recommended: {chosen.knobs}: {chosen}, measured {len(chosen.runs)} times; {known}."
    working = [point for point in points if not point.failure]
    if not working:
        return "Nothing is recommended: no point could be measured without errors."
    lowest = min(working, key=lambda point: point.p95_ms)
    return f"Nothing is recommended: no p95 is at most {slo_p95_ms:g} ms. The lowest: {lowest}, with {lowest.knobs}."


if __name__ == "__main__":
    sys.exit(main())

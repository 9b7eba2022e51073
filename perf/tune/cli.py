"""The command: read the options, search, show what was found, and write it down."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llama_engine.errors import EngineError
from triton_local.errors import LauncherError
from triton_local.repository import resolve_model

from perf import environment
from perf.checkpoint import default_checkpoint
from perf.command import make_command, model_name
from perf.course import Budget
from perf.load.driver import LoadError
from perf.results import Results
from perf.tune import options
from perf.tune.allowance import Allowance
from perf.tune.config import ConfigError
from perf.tune.findings import TUNED, Findings
from perf.tune.knobs import Knobs, run_key
from perf.tune.measuring import ReadBackError, measure
from perf.tune.options import Options
from perf.tune.page import conclusion, table
from perf.tune.search import Search
from perf.tune.subject import Subject

MET, NOT_MET, FAILED, INTERRUPTED = 0, 1, 2, 130

_VARIABLES = ("--slo-p95-ms", "--budget", "--model")
"""Options that `make tune` has variables for."""
_PLACES = ("--output", "--config-out")


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune; return the exit code. What goes wrong is one line on stderr."""
    chosen = options.read(arguments, os.environ)
    try:
        return _tune(chosen, command(chosen, sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:
        print("\ntune: interrupted; --resume goes on with what was measured", file=sys.stderr)
        return INTERRUPTED
    except (ConfigError, EngineError, LauncherError, LoadError, ReadBackError, OSError, ValueError) as error:
        print(f"tune: {error}", file=sys.stderr)
        return FAILED


def command(chosen: Options, arguments: Sequence[str]) -> str:
    """Return how to measure this again, by make. arguments: those that were given; paths keep their last part only."""
    variables = {"SLO_P95_MS": f"{chosen.slo_p95_ms:g}", "BUDGET": f"{chosen.budget_s / 60:g}"}
    if chosen.model is not None:
        variables["MODEL"] = model_name(chosen.model)
    left = iter(arguments)
    others = []
    for word in left:
        name, _, value = word.partition("=")
        if name in _VARIABLES:
            if not value:
                # Given as two words, of which the next one is the value.
                next(left, None)
        elif name in _PLACES:
            others += [name, Path(value or next(left, "")).name]
        elif name != "--resume":
            others.append(word)
    return make_command("tune", variables, others)


def _tune(chosen: Options, said: str) -> int:
    budget = Budget(chosen.budget_s)
    budget.say("preparing the checkpoint and the load")
    checkpoint = _checkpoint(chosen.model)
    subject = Subject.of(chosen.variant, checkpoint, chosen.threads)
    requests = chosen.demand.sent(Path(checkpoint))
    results = Results(chosen.output, "tune", _settings(chosen, subject), chosen.resume)

    def add(knobs: Knobs, run: int) -> None:
        results.add(run_key(knobs, run), measure(subject, chosen.demand, requests, knobs))

    search = Search(
        default=subject.knobs,
        slo_p95_ms=chosen.slo_p95_ms,
        most_at_once=chosen.demand.most_at_once,
        measured=results.measurements,
        measure=add,
        allowance=Allowance(chosen.budget_s, chosen.measurements, lambda: budget.spent),
        say=budget.say,
    )
    budget.say(f"each point: {chosen.demand.in_words()}, after {chosen.demand.warmup} to warm up")
    search.run()
    findings = Findings(
        subject=subject,
        model=chosen.model,
        demand=chosen.demand,
        slo_p95_ms=chosen.slo_p95_ms,
        device=environment.device(),
        points=search.points,
        noise=search.noise,
    )
    for name, content in {"command": said, **findings.sections()}.items():
        results.section(name, content)
    results.finish()
    _show(findings, chosen)
    return MET if findings.recommended is not None else NOT_MET


def _checkpoint(model: str | None) -> str:
    """Return what LLAMA_MODEL is to be: the one asked for, else the benchmarks' own, made now if need be."""
    if model is not None:
        return resolve_model(model)
    return str(default_checkpoint())


def _settings(chosen: Options, subject: Subject) -> dict[str, Any]:
    """Return what two runs must share to be one: everything but the bound and the time."""
    return {
        "variant": subject.variant,
        "config_sha256": hashlib.sha256(subject.text.encode()).hexdigest()[:12],
        # Without the folders before it, which are this machine's own.
        "model": Path(subject.model).name if chosen.model is None or Path(subject.model).is_dir() else subject.model,
        "threads": subject.threads,
        "load": chosen.demand.described(),
        "timeout_s": chosen.demand.timeout,
    }


def _show(findings: Findings, chosen: Options) -> None:
    print(f"\n{table(findings)}\n\n{conclusion(findings)}")
    print(f"Written to {chosen.output}.")
    if findings.config is None:
        return
    print(f"\n{findings.config}")
    if chosen.config_out is not None:
        chosen.config_out.parent.mkdir(parents=True, exist_ok=True)
        chosen.config_out.write_text(findings.config)
        print(f"Written to {chosen.config_out}.")
    print(f"Saved as model_repository/llama/configs/{TUNED}.pbtxt it is served with: {findings.command}")

"""`make capacity`: how many replicas a number of users takes, by a queue that is checked against two real servers.

The check: two replicas with a thread each, and an OpenAI endpoint beside each. After closed loops, from which its steps
come, the queue gets the same Poisson arrivals as they do; a request goes to one of the two at random.

The numbers of replicas: by closed loops of the results in MEASURED, in which a replica has two cores.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

from perf.capacity.queue import CHECKED, KINDS, Replica, figures, highest_rate, poisson, simulate
from perf.checkpoint import smollm2
from perf.command import make_command, positive
from perf.environment import StealTime
from perf.load.generator import generate
from perf.load.protocols import Target
from perf.load.records import Record, Run
from perf.load.summary import summarize
from perf.load.workload import SLOTS, requests
from perf.results_file import RESULTS, Results, read
from perf.servers.triton import our_server

REPLICAS, LOOPS, LOOP_S, TIMEOUT_S = 2, (1, 8, SLOTS), 6.0, 120.0
LOADS = (0.4, CHECKED)
"""Of the check: shares of the requests per second at which all slots are taken."""
OUTPUT_TOKENS = 64
"""Mean of the check: requests enough for a 95th percentile in a minute."""
USERS = (10, 1_000, 100_000)
MEASURED = {
    "chat": ("bench-smollm2", "smollm2/{}/triton_llama_int8"),
    "retrieval": ("bench-drafts", "drafts/retrieval/{}/triton_llama_int8_drafts_off"),
    "batch": ("bench-drafts", "drafts/retrieval/{}/triton_llama_int8_drafts_off"),
}
"""For each kind of users, closed loops of about as many tokens: a file of perf/results, and its measurements' keys."""
SERVER = our_server("triton_llama_int8", "triton-llama INT8", "streaming", "int8", chats=True)


def main() -> None:
    """Compute the numbers of replicas, run the check and write the result."""
    parser = argparse.ArgumentParser(prog="make capacity", description=__doc__)
    parser.add_argument("--seconds", type=positive, default=45.0, help="of each load; default 45")
    options = parser.parse_args()
    settings = {"model": smollm2().name, "replicas": REPLICAS, "threads": 1, "output_tokens": OUTPUT_TOKENS}
    results = Results(RESULTS / "capacity.json", "capacity", settings, make_command("capacity"))
    row = SERVER.to_json()
    for name, kind in KINDS.items():
        rate = highest_rate(benchmarked(*MEASURED[name]), kind)
        replicas = {str(users): math.ceil(users / (rate * kind.period)) for users in USERS}
        results.add(name, {**row, "kind": name, **kind._asdict(), "rate": round(rate, 3), "replicas": replicas})
    with ExitStack() as started:
        servers = [started.enter_context(SERVER.start(smollm2(), 1)) for _ in range(REPLICAS)]
        targets = [replace(server.target, fields={"ignore_eos": True}) for server in servers]
        prompt, replica = calibrated(targets)
        results.section("steps", {"prompt_tokens": prompt, **replica._asdict()})
        for share in LOADS:
            measurement = check(targets, prompt, replica, share, options.seconds)
            results.add(f"check/{share}", {**row, "settings": servers[0].settings, "share": share, **measurement})
    results.finish()


def calibrated(targets: Sequence[Target]) -> tuple[int, Replica]:
    """Return a prompt's tokens, and the replica that each server is while the others have as much to do."""
    summaries, prompts = dict[int, list[dict[str, Any]]](), list[int]()
    for users in LOOPS:
        load = requests(smollm2(), "uniform", 8 * users + 64, OUTPUT_TOKENS)
        drive = partial(generate, requests=load, concurrency=users, timeout=TIMEOUT_S, warmup=users, seconds=LOOP_S)
        with ThreadPoolExecutor() as threads:
            runs = [Run(users, tuple(records), users) for records in threads.map(drive, targets)]
        summaries[users] = [summarize(run) for run in runs]
        prompts += [record.prompt_tokens or 0 for run in runs for record in run.records]
    rates = {users: fmean(each["requests_per_second"] for each in summaries[users]) for users in LOOPS}
    ttft = fmean(each["time_to_first_token_ms"]["mean"] for each in summaries[1]) / 1e3
    return round(fmean(prompts)), Replica.measured(ttft, fmean(prompts), OUTPUT_TOKENS, rates)


def check(targets: Sequence[Target], prompt: int, replica: Replica, share: float, seconds: float) -> dict[str, object]:
    """Return what Poisson arrivals measure beside what the queue predicts of the same ones."""
    rate = len(targets) * share * replica.saturated(prompt, OUTPUT_TOKENS)
    load = requests(smollm2(), "uniform", math.ceil(rate * seconds), OUTPUT_TOKENS)
    arrivals = poisson(rate, prompt, [request.output_tokens for request in load], seed=0)
    chance = random.Random(1)
    chosen = [chance.randrange(len(targets)) for _ in load]
    parts = [[number for number, other in enumerate(chosen) if other == each] for each in range(len(targets))]

    def drive(target: Target, part: Sequence[int]) -> list[Record]:
        moments = [arrivals[number].at for number in part]
        return generate(target, [load[number] for number in part], len(part), TIMEOUT_S, arrivals=moments)

    steal = StealTime()
    with ThreadPoolExecutor() as threads:
        measured = [record for records in threads.map(drive, targets, parts) for record in records]
    stolen = round(steal.share(), 4)
    predicted = [record for part in parts for record in simulate(replica, [arrivals[number] for number in part])]
    return {
        "requests": len(load),
        "requests_per_second": round(rate, 3),
        "errors": sum(bool(record.error) for record in measured),
        "stolen_share": stolen,
        "predicted": figures(predicted),
        "measured": figures(measured),
    }


def benchmarked(file: str, key: str) -> Replica:
    """Return the replica that a result's closed loops measured."""
    rows = read(RESULTS / f"{file}.json").content["measurements"]
    loops = {users: rows[key.format(users)] for users in LOOPS}
    prompt, output = (loops[1]["load"][name] for name in ("prompt_tokens", "mean_output_tokens"))
    rates = {users: row["tokens_per_second"] / output for users, row in loops.items()}
    return Replica.measured(loops[1]["time_to_first_token_ms"]["mean"] / 1e3, prompt, output, rates)


if __name__ == "__main__":
    main()

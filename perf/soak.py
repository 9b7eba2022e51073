"""Mixed load on `make serve`'s server for MINUTES: is every request answered, and is the processes' memory flat?

A round is a load of uniform lengths over Triton's streams (HTTP), gRPC and OpenAI's protocol, all at the same time.
After each round, while the server is idle, the memory of its processes is sampled (PSS: shared pages count once). Flat:
the largest sample of the last quarter is at most MAX_GROWTH_MIB above that of the quarter before. The first quarters
don't count, because caches fill up. At the end the server gets a SIGINT and must end with code 0.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
from triton_llama import LlamaClient, TritonLlamaError

from perf.checkpoint import EMBEDDED
from perf.command import existing_checkpoint, make_command, positive
from perf.environment import family, pss_mib
from perf.load.generator import drive
from perf.load.protocols import Request, Target
from perf.results_file import Results
from perf.workload import warm_and_measured

MAX_GROWTH_MIB = 16.0
USERS = 8
"""Concurrent users of each protocol."""
REQUESTS = 64
"""Requests of each protocol in a round."""
MEAN_OUTPUT = 40
MIN_ROUNDS = 8
_READY_S = 900.0
_ROUND_S = 600.0
_END_S = 180.0
_SERVED_NAME = "soaked"


def main() -> int:
    """Soak, write the result and print it. Returns 0 if it passed, else 1."""
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--minutes", type=positive, default=30.0, help="default 30")
    parser.add_argument("--model", type=existing_checkpoint, default=EMBEDDED, help="a Llama in safetensors")
    parser.add_argument("--output", type=Path, default=Path("perf/results/soak.json"), metavar="FILE")
    options = parser.parse_args()
    settings = {"model": options.model.name, "users": 3 * USERS, "max_growth_mib": MAX_GROWTH_MIB}
    results = Results(options.output, "soak", settings, make_command("soak"))
    faults: list[str] = []
    samples: list[dict[str, float]] = []
    requests = warm_and_measured(options.model, "uniform", 0, REQUESTS, MEAN_OUTPUT)
    with tempfile.TemporaryDirectory() as folder:
        launcher, addresses = served(options.model, Path(folder) / "ready.json")
        try:
            until = time.monotonic() + 60 * options.minutes
            while time.monotonic() < until or len(samples) < MIN_ROUNDS:
                faults += one_round(addresses, requests)
                samples.append(memory_mib(launcher.pid))
                print(f"round {len(samples)}: {samples[-1]}, {len(faults)} faults", flush=True)
                results.add(f"round/{len(samples)}", samples[-1])
        finally:
            launcher.send_signal(signal.SIGINT)
            code = launcher.wait(_END_S)
    growth = {name: grown(values) for name, values in by_process(samples).items()}
    faults += [f"{name} grew by {mib:.1f} MiB" for name, mib in growth.items() if mib > MAX_GROWTH_MIB]
    faults += [f"the server ended with code {code}"] if code else []
    results.section("growth_mib", growth)
    results.section("faults", faults)
    results.finish()
    print(*faults, sep="\n")
    print(f"{'FAILED' if faults else 'passed'}: {len(samples)} rounds, growth in MiB {growth}; {options.output}")
    return 1 if faults else 0


def served(model: Path, ready: Path) -> tuple[subprocess.Popen[bytes], Mapping[str, str]]:
    """Start the launcher, as `make serve` does, at free ports; return it and its addresses (host:port by service)."""
    command = [sys.executable, "-m", "triton_local", "--model", str(model), "--ready-file", str(ready)]
    command += [word for name in ("http", "grpc", "metrics", "openai") for word in (f"--{name}-port", "0")]
    quiet = {"TRITON_LLAMA_OPENAI_LOG_REQUESTS": "none", "LLAMA_LOG_REQUESTS": "none"}
    environment = {**os.environ, **quiet, "TRITON_LLAMA_OPENAI_SERVED_NAME": _SERVED_NAME}
    launcher = subprocess.Popen(command, env=environment, start_new_session=True)
    deadline = time.monotonic() + _READY_S
    while not ready.exists():
        if launcher.poll() is not None or time.monotonic() > deadline:
            launcher.terminate()
            raise RuntimeError(f"the server is not ready; its exit code is {launcher.poll()}")
        time.sleep(0.2)
    return launcher, json.loads(ready.read_text())


def one_round(addresses: Mapping[str, str], requests: Sequence[Request]) -> list[str]:
    """Put a load on every protocol at the same time; return what went wrong."""
    targets = [
        Target("http", "triton_stream", f"http://{addresses['http']}", "llama"),
        Target("openai", "openai_completions", f"http://{addresses['openai']}", _SERVED_NAME, {"ignore_eos": True}),
    ]
    with ThreadPoolExecutor() as threads:
        grpc = threads.submit(_grpc_load, addresses["grpc"], requests)
        runs = threads.map(lambda target: drive(target, requests, USERS, 0, _ROUND_S), targets)
        faults = [
            f"{target.name}: {record.error}"
            for target, run in zip(targets, runs, strict=True)
            for record in run.records
            if record.error
        ]
        return [*faults, *grpc.result()]


def _grpc_load(address: str, requests: Sequence[Request]) -> list[str]:
    def fault(request: Request) -> str:
        tokens = request.output_tokens
        try:
            completion = client.generate(request.prompt, max_tokens=tokens, min_tokens=tokens)
        except TritonLlamaError as error:
            return f"grpc: {error}"
        came = completion.num_output_tokens
        return "" if came == tokens else f"grpc: {came} tokens came, not {tokens}"

    with LlamaClient(address, protocol="grpc") as client, ThreadPoolExecutor(USERS) as users:
        return [message for message in users.map(fault, requests) if message]


def memory_mib(pid: int) -> dict[str, float]:
    """Return the PSS of a process's family in MiB, by what each is."""
    memory: dict[str, float] = {}
    for process in family(pid):
        # One may end meanwhile.
        with suppress(psutil.NoSuchProcess):
            words = process.cmdline() or [process.name()]
            name = "openai" if "triton_llama_openai" in " ".join(words) else Path(words[0]).name
            memory[name] = round(memory.get(name, 0.0) + pss_mib(process), 1)
    return memory


def by_process(samples: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Return the samples of each process that is there in all of them."""
    names = set.intersection(*(set(sample) for sample in samples))
    return {name: [sample[name] for sample in samples] for name in sorted(names)}


def grown(values: Sequence[float]) -> float:
    """Return the maximum of the last quarter of the values minus the maximum of the third quarter, rounded to 0.1."""
    quarter = len(values) // 4
    return round(max(values[-quarter:]) - max(values[-2 * quarter : -quarter]), 1)


if __name__ == "__main__":
    sys.exit(main())

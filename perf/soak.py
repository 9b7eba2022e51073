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
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from triton_llama import LlamaClient, TritonLlamaError

from perf.checkpoint import EMBEDDED
from perf.command import existing_checkpoint, make_command, positive
from perf.environment import family, pss_mib
from perf.load.arrivals import Closed
from perf.load.generator import drive
from perf.load.protocols import Protocol, Request, Target
from perf.results_file import Results
from perf.workload import warm_and_measured

MAX_GROWTH_MIB = 16.0
USERS = 8
"""Of each protocol."""
REQUESTS = 64
"""Of each protocol in a round."""
MEAN_OUTPUT = 40
MIN_ROUNDS = 8
_READY_S = 900.0
_ROUND_S = 600.0
_END_S = 180.0
_SERVED_NAME = "soaked"
_ENVIRONMENT = {
    "TRITON_LLAMA_OPENAI_SERVED_NAME": _SERVED_NAME,
    "TRITON_LLAMA_OPENAI_LOG_REQUESTS": "none",
    "LLAMA_LOG_REQUESTS": "none",
}
_PROTOCOLS: Mapping[str, tuple[Protocol, str, Mapping[str, object]]] = {
    "http": ("triton_stream", "llama", {}),
    "openai": ("openai_completions", _SERVED_NAME, {"ignore_eos": True}),
}


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
    with served(options.model) as (launcher, addresses):
        until = time.monotonic() + 60 * options.minutes
        while time.monotonic() < until or len(samples) < MIN_ROUNDS:
            faults += one_round(addresses, options.model, len(samples))
            samples.append(memory_mib(launcher.pid))
            print(f"round {len(samples)}: {samples[-1]}, {len(faults)} faults", flush=True)
            results.add(f"round/{len(samples)}", samples[-1])
        launcher.send_signal(signal.SIGINT)
        if (code := launcher.wait(_END_S)) != 0:
            faults.append(f"the server ended with code {code}")
    growth = {name: grown(values) for name, values in by_process(samples).items()}
    faults += [f"{name} grew by {mib:.1f} MiB" for name, mib in growth.items() if mib > MAX_GROWTH_MIB]
    results.section("growth_mib", growth)
    results.section("faults", faults)
    results.finish()
    print(*faults, sep="\n")
    print(f"{'FAILED' if faults else 'passed'}: {len(samples)} rounds, growth in MiB {growth}; {options.output}")
    return 1 if faults else 0


@contextmanager
def served(model: Path) -> Iterator[tuple[subprocess.Popen[bytes], Mapping[str, str]]]:
    """Run the launcher, as `make serve` does, at free ports; yield it and its addresses (host:port by service)."""
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready.json"
        command = [sys.executable, "-m", "triton_local", "--model", str(model), "--ready-file", str(ready)]
        command += [word for name in ("http", "grpc", "metrics", "openai") for word in (f"--{name}-port", "0")]
        environment = {**os.environ, **_ENVIRONMENT}
        launcher = subprocess.Popen(command, env=environment, start_new_session=True)
        try:
            deadline = time.monotonic() + _READY_S
            while not ready.exists():
                if launcher.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the server is not ready; its exit code is {launcher.poll()}")
                time.sleep(0.2)
            yield launcher, json.loads(ready.read_text())
        finally:
            if launcher.poll() is None:
                launcher.send_signal(signal.SIGTERM)
                launcher.wait(_END_S)


def one_round(addresses: Mapping[str, str], model: Path, number: int) -> list[str]:
    """Put a load on every protocol at the same time; return what went wrong."""
    requests = warm_and_measured(model, "uniform", 0, REQUESTS, MEAN_OUTPUT)
    with ThreadPoolExecutor() as threads:
        loads = [threads.submit(_http_load, name, addresses, requests) for name in _PROTOCOLS]
        loads.append(threads.submit(_grpc_load, addresses["grpc"], requests))
        return [f"round {number + 1}: {fault}" for load in loads for fault in load.result()]


def _http_load(name: str, addresses: Mapping[str, str], requests: Sequence[Request]) -> list[str]:
    protocol, model, fields = _PROTOCOLS[name]
    target = Target(name, protocol, f"http://{addresses[name]}", model, fields)
    run = drive(target, requests, Closed(USERS), 0, _ROUND_S)
    return [f"{name}: {record.error}" for record in run.records if record.error]


def _grpc_load(address: str, requests: Sequence[Request]) -> list[str]:
    faults: list[str] = []

    def send(request: Request) -> None:
        try:
            completion = client.generate(
                request.prompt, max_tokens=request.output_tokens, min_tokens=request.output_tokens
            )
        except TritonLlamaError as error:
            faults.append(f"grpc: {error}")
        else:
            if completion.num_output_tokens != request.output_tokens:
                faults.append(f"grpc: {completion.num_output_tokens} tokens came, not {request.output_tokens}")

    with LlamaClient(address, protocol="grpc") as client, ThreadPoolExecutor(USERS) as users:
        list(users.map(send, requests))
    return faults


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
    """Return how much the largest of the last quarter is above the largest of the quarter before."""
    quarter = len(values) // 4
    return round(max(values[-quarter:]) - max(values[-2 * quarter : -quarter]), 1)


if __name__ == "__main__":
    sys.exit(main())

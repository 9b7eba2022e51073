"""Made-up results: complete in form, from formulas, for the tests of tables and plots."""

from __future__ import annotations

import json
from pathlib import Path

Content = dict[str, object]

OURS = {
    "naive_fp16": ("naive FP16", "FP16", 60.0, 1, 900.0),
    "naive_fp32": ("naive FP32", "FP32", 100.0, 1, 1000.0),
    "batched_fp16": ("batched FP16", "FP16", 260.0, 8, 3100.0),
    "batched_int8": ("batched INT8", "INT8", 240.0, 8, 4100.0),
    "inflight_int8": ("in-flight INT8", "INT8", 620.0, 32, 5200.0),
    "inflight_fp32": ("in-flight FP32", "FP32", 700.0, 32, 4300.0),
}
PEERS = {
    "triton_llama_int8": ("triton-llama INT8", "INT8", 610.0),
    "triton_llama_fp32": ("triton-llama FP32", "FP32", 690.0),
    "naive_fastapi": ("naive FastAPI", "FP32", 70.0),
    "batching_fastapi": ("batching FastAPI", "FP32", 230.0),
    "transformers_serve": ("transformers serve", "FP32", 410.0),
}
STREAMED = ("triton_llama_int8", "triton_llama_fp32", "transformers_serve")


def result(kind: str, command: str, measurements: Content, **sections: object) -> Content:
    """A result's file in the form that perf.results writes."""
    machine = {
        "commit": "0123456789abcdef0123456789abcdef01234567", "uncommitted_changes": False,
        "device": "CPU: Made-up 9000", "cores": 2, "python": "3.11.7",
        "versions": {"torch": "2.13.0+cpu", "transformers": "5.23.0", "locust": "2.47.0"},
    }  # fmt: skip
    head = {"kind": kind, "date": "2001-01-01T00:00:00+00:00", "machine": machine, "command": command}
    settings = {"model": "a made-up Llama", "threads": 1}
    return {**head, "settings": settings, "measurements": measurements, **sections}


def times(median: float) -> Content:
    return {"mean": median * 1.02, "p50": median, "p95": median * 1.4, "p99": median * 1.6, "max": median * 1.7}


def measurement(server: str, title: str, weights: str, rate: float, mix: str, concurrency: int = 32) -> Content:
    """One server's measurement at `rate` tokens per second; latencies follow from Little's law."""
    return {
        "server": server, "title": title, "weights": weights,
        "load": {"mix": mix, "concurrency": concurrency, "rate_per_second": None, "mean_output_tokens": 200},
        "requests": 64, "errors": 0, "requests_per_second": round(rate / 200, 4), "tokens_per_second": rate,
        "latency_ms": times(1e3 * concurrency * 200 / rate),
    }  # fmt: skip


def limit(rate: float, highest: float, bound_by: str = "operations") -> Content:
    return {"tokens_per_second": highest, "fraction": round(rate / highest, 4), "bound_by": bound_by}


def of_ours(mix: str, slower: float = 1.0) -> Content:
    """The article's servers at one mix of lengths."""
    found: Content = {}
    for server, (title, weights, rate, rows, highest) in OURS.items():
        found[server] = {
            **measurement(server, title, weights, round(rate / (slower if rows > 1 else 1), 1), mix),
            "memory": {"kind": "PSS", "weights_mib": 58.1 if weights == "FP16" else 33.4, "process_mib": 1234.5},
            "mean_rows": rows * 0.93, "mean_batch": min(rows, 8) * 0.97,
            "limit": limit(rate / slower, highest, "operations" if rows > 1 else "bandwidth"),
        }  # fmt: skip
    return found


def of_peers(mix: str, slower: float = 1.0, poisson: float | None = None) -> Content:
    """The baselines in a closed loop, or at `poisson` requests per second with goodput; one of them couldn't run."""
    found: Content = {"vllm": {"server": "vllm", "title": "vLLM", "not_run": "no wheel for this made-up machine"}}
    for server, (title, weights, rate) in PEERS.items():
        one = measurement(server, title, weights, round(rate / slower, 1), mix)
        one["memory"] = {"kind": "PSS", "weights_mib": 116.0, "process_mib": 987.6}
        one["limit"] = limit(rate, 4300.0)
        if server in STREAMED:
            one["time_to_first_token_ms"] = times(400.0 + 0.5 * (700 - rate))
            one["inter_token_latency_ms"] = times(1e3 * 32 / rate)
        if poisson is not None:
            one["load"] = {"mix": mix, "concurrency": None, "rate_per_second": poisson, "mean_output_tokens": 200}
            slo, share = (
                {"time_to_first_token_s": 2.0, "inter_token_latency_s": 0.1},
                0.97 if server in STREAMED else 0.05,
            )
            one["goodput"] = {"slo": slo, "requests_per_second": round(share * poisson, 4), "share": share}
        found[server] = one
    return found


def account() -> Content:
    """An overhead account: runs, and the parts of two wholes."""

    def part(name: str, share: float, whole: float) -> Content:
        seconds, parent = share * whole, name.rpartition("/")[0]
        return {"name": name, "parent": parent, "seconds": seconds, "share": share, "per_token_us": 78.125 * seconds}

    engine = {"": 1.0, "/step": 0.9, "/step/forward": 0.8, "/step/sampling": 0.1, "/the rest of engine": 0.1}
    request = {"": 1.0, "/queue": 0.4, "/tokenization": 0.002}
    rates = {"server": 610.0, "engine": 640.0, "slot_forward": 700.0, "forward": 710.0}
    return {
        "settings": {"mix": "uniform", "requests": 128, "slots": 32, "quantization": "int8"},
        "runs": {name: {"tokens_per_second": rate} for name, rate in rates.items()},
        "parts": [
            *(part(f"bare engine{name}", share, 20.0) for name, share in engine.items()),
            *(part(f"mean request{name}", share, 10.0) for name, share in request.items()),
        ],
    }


def bench() -> Content:
    """A whole bench.json."""
    parts = {
        "article/equal": of_ours("equal"),
        "article/uniform": of_ours("uniform", 1.3),
        "article/geometric": of_ours("geometric", 1.8),
        "peers/closed/equal": of_peers("equal"),
        "peers/closed/uniform": of_peers("uniform", 1.2),
        "peers/poisson/uniform": of_peers("uniform", 1.2, poisson=1.5),
    }
    measurements = {f"{prefix}/{key}": one for prefix, part in parts.items() for key, one in part.items()}
    rates: Content = {"device": "cpu", "threads": 1, "bandwidth": {"33554432": 3.6e10}}
    rates["operations"] = {"fp32": 9.5e10, "fp16": 1.25e10}
    return result("bench", "make bench", measurements, rates=rates, overhead=account())


def sweep() -> Content:
    """A whole sweep.json: three of the servers at 1 … 128 requests at a time."""
    found: Content = {}
    for server in ("naive_fp16", "batched_int8", "inflight_int8"):
        title, weights, rate, rows, highest = OURS[server]
        for concurrency in (1, 2, 4, 8, 16, 32, 64, 128):
            filled = min(concurrency, rows) / rows
            one = measurement(server, title, weights, round(rate * filled**0.6, 1), "uniform", concurrency)
            found[f"sweep/{server}/{concurrency}"] = {**one, "limit": limit(rate * filled**0.6, highest * filled**0.8)}
    return result("sweep", "make sweep", found)


def quality() -> Content:
    """A whole quality.json."""

    def int8(threshold: int) -> Content:
        return {
            "title": f"INT8, threshold {threshold}", "weights_mib": 7.6, "perplexity": 35.811,
            "kl_nats": {"mean": 0.00042, "p99": 0.0031}, "top1_agreement": 0.9876,
            "loss_difference": {"mean": 0.00039, "standard_error": 0.00021},
        }  # fmt: skip

    first = {"title": "FP32", "weights_mib": 21.0, "perplexity": 35.797}
    measurements: Content = {"fp32": first, "int8_threshold_6": int8(6), "int8_threshold_0": int8(0)}
    content = result("quality", "python -m perf.quality", measurements)
    content["settings"] = {"model": "models/pydoc-llama", "context": 512, "text": "a made-up text", "tokens": 12345}
    return content


def tune() -> Content:
    """A whole tune.json: slots against latency, a point that failed, and a recommendation."""

    def point(slots: int, delay: int, rate: float | None, p95: float, pareto: bool) -> Content:
        settings = {"max_queue_delay_microseconds": delay, "preferred_batch_size": [4, slots], "slots": slots}
        return {
            "settings": {**settings, "prefill_tokens": 512}, "tokens_per_second": rate, "pareto": pareto,
            "p50_ms": rate and p95 / 1.4, "p95_ms": rate and p95, "failure": None if rate else "memory",
        }  # fmt: skip

    points = [
        point(8, 10000, 310.0, 7200.0, True),
        point(16, 10000, 480.0, 8800.0, True),
        point(32, 10000, 610.0, 11500.0, True),
        point(32, 40000, 590.0, 12100.0, False),
        point(64, 10000, 640.0, 17100.0, True),
        point(64, 0, 600.0, 17900.0, False),
        point(128, 0, None, 0.0, False),
    ]
    recommended = {"settings": points[2]["settings"], "config": "made up", "command": "make serve VARIANT=tuned"}
    command = "python -m perf.tune --slo-p95-ms 12000"
    content = result("tune", command, {}, slo_p95_ms=12000.0, points=points, recommended=recommended)
    load = measurement("x", "x", "INT8", 1.0, "uniform")["load"]
    content["settings"] = {"model": "a made-up Llama", "threads": 1, "load": load}
    return content


WAVE: Content = {
    "title": "INT8, threshold 0", "rows": 32, "requests_per_second": 25.0, "tokens_per_second": 5000.0,
    "limit": {"tokens_per_second": 8000.0, "fraction": 0.625},
}  # fmt: skip
"""Rows that decode together on a GPU; `generate()`'s have no more than that."""

STEPPED: Content = {
    **WAVE, "step_ms": {"p50": 6.4}, "step_limit_ms": 3.9, "vram_mib": 13000.0,
    "steps": "decode steps: fused 8-bit product and attention, launched",
}  # fmt: skip
"""The same of the engine."""

PRODUCT: Content = {
    "outputs": 4096, "inputs": 11008, "rows": 8, "bandwidth_us": {"int8": 15.0, "fp16": 30.0},
    "ways": {
        "fp16": {"eager_us": 20.0, "graph_us": 10.0},
        "bitsandbytes_6": {"eager_us": 90.0, "graph_us": None},
        "fused": {"failed": "RuntimeError: no"},
    },
}  # fmt: skip
"""A matrix in three ways, of which one couldn't be captured and one failed."""


def gpu(measurements: Content | None = None) -> Content:
    """A gpu.json with these measurements; None is one of every kind there is a table of."""
    aim: Content = {"aim": "quick", "bound": 24.0, "measured": 25.0, "from": "decode/int8/32", "met": True}
    some = {
        "decode/int8/32": STEPPED,
        "products/4096x11008/8": PRODUCT,
        **{f"article/{mix}/{server}": one for mix in ("equal", "uniform") for server, one in of_ours(mix).items()},
    }
    content = result("gpu", "make bench-gpu", some if measurements is None else measurements, verdict=[aim])
    content["settings"] = {"model": "a made-up Llama", "threads": 1, "prompt_tokens": 100, "output_tokens": 200}
    return content


def written(folder: Path, *contents: Content) -> Path:
    """Write each into the folder under its kind, as a run would."""
    folder.mkdir(parents=True, exist_ok=True)
    for content in contents:
        (folder / f"{content['kind']}.json").write_text(json.dumps(content, indent=1) + "\n")
    return folder

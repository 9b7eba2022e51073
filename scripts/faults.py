"""Insert faults by hand, one at a time, and show that each fails a test: `make faults`.

Works on a copy of the tracked files. A fault whose text no longer occurs exactly once is an error: update it here.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
ENGINE = "model_repository/llama/1/llama_engine"
GRAPHS = f"{ENGINE}/cuda_graphs.py"
GRAPH_TESTS = "tests/engine/test_cuda_graphs.py"
TENANT_TESTS = "tests/server/test_tenants.py"
ENDPOINT = "frontend/triton_llama_openai"
SECONDS = 300


class Fault(NamedTuple):
    """Replace `old` by `new` in `file`; one of `tests` must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: str


FAULTS = (
    # CUDA graphs: the thirteen faults that their tests were made for.
    Fault(
        "padding rows write to their own position",
        GRAPHS,
        "torch.where(active, self._batch.positions[:rows], self._padding)",
        "self._batch.positions[:rows].clone()",
        GRAPH_TESTS,
    ),
    Fault(
        "padding rows read their stale token, FAILED among them",
        GRAPHS,
        "torch.where(active, self._batch.tokens[:rows], 0)",
        "self._batch.tokens[:rows].clone()",
        GRAPH_TESTS,
    ),
    Fault("the span is one position short", GRAPHS, "longest + 1)]()", "longest)]()", GRAPH_TESTS),
    Fault(
        "the number of decoding rows is that of the previous step",
        GRAPHS,
        "        rows = len(sequences)\n        self._decoding.fill_(decoding)",
        "        rows = len(sequences)",
        GRAPH_TESTS,
    ),
    Fault(
        "prefilled logits are lost",
        GRAPHS,
        "self._logits[decoding:rows] = self._model.logits",
        "self._logits[decoding:rows].clone()[:] = self._model.logits",
        GRAPH_TESTS,
    ),
    Fault(
        "bad words are ignored",
        f"{ENGINE}/sampling/sampling_state.py",
        "own=any(sequence.processor is not None for sequence in sequences),",
        "own=False,",
        GRAPH_TESTS,
    ),
    Fault("sampling is always greedy", GRAPHS, "if features.cover(batch.features))", "if True)", GRAPH_TESTS),
    Fault("random words are not renewed", GRAPHS, "if self._batch.features.noise:", "if False:", GRAPH_TESTS),
    Fault("min_tokens is ignored", GRAPHS, "too_early & self._sampler.is_end", "too_early & False", GRAPH_TESTS),
    Fault(
        "free slots advance, too",
        GRAPHS,
        "self._batch.positions[:rows] += self._active(rows)",
        "self._batch.positions[:rows] += 1",
        GRAPH_TESTS,
    ),
    Fault(
        "sampled tokens are not stored",
        GRAPHS,
        "        self._batch.tokens[:rows] = tokens\n\n    def _verify",
        "\n    def _verify",
        GRAPH_TESTS,
    ),
    Fault("wrong graphs are accepted", GRAPHS, "if not error <= TOLERANCE:", "if False:", GRAPH_TESTS),
    Fault(
        "failing replays are repeated forever",
        f"{ENGINE}/slot_batch.py",
        "self._failed_replays += 1",
        "self._failed_replays += 0",
        GRAPH_TESTS,
    ),
    # Over the whole.
    Fault(
        "scheduler: the last sequence is admitted first",
        f"{ENGINE}/scheduler.py",
        "for sequence in [one for one in self._waiting if",
        "for sequence in [one for one in reversed(self._waiting) if",
        "tests/engine/test_scheduler.py",
    ),
    Fault(
        "scheduler: a deadline aborts running sequences, too",
        f"{ENGINE}/scheduler.py",
        "late = [sequence for sequence in self._waiting if",
        "late = [sequence for sequence in [*self._waiting, *self._running] if",
        "tests/engine/test_scheduler.py",
    ),
    Fault(
        "stop strings: a match across tokens is missed",
        f"{ENGINE}/text/stop_checker.py",
        "max(checked - len(word) + 1, 0)",
        "checked",
        "tests/unit/test_stop_checker.py",
    ),
    Fault(
        "stop strings: the beginning of one is streamed",
        f"{ENGINE}/text/stop_checker.py",
        "self._output.next_delta(held_back, final=False)",
        "self._output.next_delta(0, final=False)",
        "tests/unit/test_stop_checker.py",
    ),
    Fault(
        "sampling: the repetition penalty forgets the prompt",
        f"{ENGINE}/sampling/sampler.py",
        "seen = state.in_prompt[rows] | (state.counts[rows] > 0)",
        "seen = state.counts[rows] > 0",
        "tests/unit/test_sampler.py",
    ),
    Fault(
        "sampling: a moved sequence draws with the seed of its new slot",
        f"{ENGINE}/sampling/sampling_state.py",
        "        self.seeds[target] = self.seeds[source]\n",
        "",
        "tests/engine/test_continuous_batching.py",
    ),
    Fault(
        "KV slots: a moved row reads those of the removed sequence",
        f"{ENGINE}/slot_batch.py",
        "for state in (self.kv_slots, self.tokens, self.positions):",
        "for state in (self.tokens, self.positions):",
        "tests/engine/test_continuous_batching.py",
    ),
    Fault(
        "KV cache: stale values are gathered",
        f"{ENGINE}/model/kv_cache.py",
        "return keys.masked_fill_(stale, 0), values.masked_fill_(stale, 0)",
        "return keys, values",
        "tests/engine/test_kv_cache.py::test_stale_values_change_no_token",
    ),
    Fault(
        "KV cache: the setting of its dtype has no effect",
        f"{ENGINE}/model/precision.py",
        '    if setting == "auto":\n        return torch.bfloat16 if compiled else dtype\n',
        "    if True:\n        return torch.bfloat16 if compiled else dtype\n",
        "tests/engine/test_kv_cache_dtype.py",
    ),
    # Exact INT8 on a CPU; those in terms.h show on a CPU with AVX512-VNNI only.
    Fault(
        "CPU runner: the start of a chunk is ignored",
        f"{ENGINE}/model/cpu_runner.py",
        "torch.tensor([chunk.start for chunk in chunks])",
        "torch.tensor([0 for chunk in chunks])",
        "tests/engine/test_exact_bits.py::test_logits_and_tokens_are_the_same_bits_alone_and_in_any_mix[auto-2-20]",
    ),
    Fault(
        "CPU kernels: the packed weights' zero point stays in the sums",
        f"{ENGINE}/kernels/cpu/terms.h",
        "_mm512_set1_epi32(x.offset[2 * (row + r) + term])",
        "_mm512_setzero_si512()",
        "tests/engine/cpu_kernels/test_cpu_linear.py",
    ),
    Fault(
        "CPU kernels: sums of 16-bit pairs leave int32",
        f"{ENGINE}/kernels/cpu/pairs.h",
        "constexpr int64_t EXACT_INPUTS = 512;",
        "constexpr int64_t EXACT_INPUTS = 1 << 20;",
        "tests/engine/cpu_kernels/test_cpu_linear.py",
    ),
    Fault(
        "CPU kernels: products of two terms are not verified",
        f"{ENGINE}/kernels/cpu/selection.py",
        "for terms in (1, 2):",
        "for terms in (1,):",
        "tests/engine/cpu_kernels/test_cpu_selection.py",
    ),
    Fault(
        "CPU kernels: attention of NaN is verified",
        f"{ENGINE}/kernels/cpu/selection.py",
        "if not error <= ATTENTION_TOLERANCE[cache_dtype]:",
        "if error > ATTENTION_TOLERANCE[cache_dtype]:",
        "tests/engine/cpu_kernels/test_cpu_selection.py",
    ),
    Fault(
        "CPU kernels: attention reads one position too many",
        f"{ENGINE}/kernels/cpu/forward.cpp",
        "tokens.positions[token] + 1}",
        "tokens.positions[token] + 2}",
        "tests/engine/cpu_kernels/test_cpu_forward.py",
    ),
    # Between two tenants.
    Fault(
        "tenants: a sequence gets the token of the next row",
        f"{ENGINE}/engine.py",
        "enumerate(tokens.tolist())",
        "enumerate(tokens.roll(1).tolist())",
        TENANT_TESTS,
    ),
    Fault(
        "tenants: guides are kept by the beginning of their texts",
        f"{ENGINE}/sampling/guided.py",
        'return kind, "" if kind == "json" else text',
        'return kind, "" if kind == "json" else text[:2]',
        TENANT_TESTS,
    ),
    Fault(
        "tenants: a stream's count is that of the tensor before",
        f"{ENGINE}/triton/tensors.py",
        "    return _counts(name, [value])\n",
        "    return _counts(name, [max(value, 20)])\n",
        TENANT_TESTS,
    ),
    Fault(
        "tenants: the log has prompts",
        f"{ENGINE}/observability/log.py",
        'if self._level == "prompts" and rows:',
        "if rows:",
        TENANT_TESTS,
    ),
    Fault(
        "tenants: the log has refused values",
        f"{ENGINE}/observability/log.py",
        'and self._level != "prompts" else',
        'and self._level == "prompts" else',
        TENANT_TESTS,
    ),
    Fault(
        "tenants: a label of a metric is what a client wrote",
        f"{ENDPOINT}/request_record.py",
        'getattr(scope.get("route"), "path", "unmatched")',
        'scope["path"]',
        TENANT_TESTS,
    ),
    Fault(
        "tenants: a chat template keeps the variables of the request before",
        f"{ENDPOINT}/chat_template.py",
        "        _deadline.set(time.monotonic() + LONGEST_RENDERING_S)\n",
        "        self._special_tokens.update(variables or {})\n"
        "        _deadline.set(time.monotonic() + LONGEST_RENDERING_S)\n",
        TENANT_TESTS,
    ),
    Fault(
        "tenants: an error shows the API key",
        f"{ENDPOINT}/auth.py",
        'ApiError(401, "the API key is wrong"',
        'ApiError(401, f"the API key {key} is wrong"',
        TENANT_TESTS,
    ),
    Fault(
        "client: a full queue is no overload",
        "client/triton_llama/translate.py",
        "    503: OverloadedError,\n",
        "",
        "tests/unit/test_client_translate.py",
    ),
    Fault(
        "supervisor: a passed liveness probe doesn't reset the failures",
        "deploy/supervisor/triton_supervisor/liveness.py",
        "failures = 0 if verdict.ok else failures + 1",
        "failures += not verdict.ok",
        "tests/programs/supervisor/test_supervisor_watch.py",
    ),
)


def copy_tracked(target: Path) -> None:
    """Copy the tracked files, as they are in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def failing_test(tree: Path, tests: str) -> str | None:
    """Run tests in the tree until one fails; return its name, None if all pass."""
    paths = [tree / folder for folder in ("client", "frontend", "deploy/local", "deploy/prepare", "deploy/supervisor")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests.split()]
    done = subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    if done.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if failed is None:
        raise SystemExit(f"pytest ended with {done.returncode} and names no test:\n{done.stdout[-2000:]}{done.stderr}")
    return failed[1]


def main() -> None:
    """Insert every fault; exit with 1 if a test doesn't notice one."""
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copy_tracked(tree)
        # The tests of exact INT8 load what is compiled; those of the kernels themselves compile.
        subprocess.run([sys.executable, tree / ENGINE / "kernels" / "cpu" / "build.py", "--optional"], check=True)
        for tests in dict.fromkeys(fault.tests for fault in FAULTS):
            if (failed := failing_test(tree, tests)) is not None:
                raise SystemExit(f"without a fault, {failed} fails")
        for fault in FAULTS:
            file = tree / fault.file
            text = file.read_text()
            if text.count(fault.old) != 1:
                raise SystemExit(f"{fault.name}: {fault.file} has {text.count(fault.old)} times {fault.old!r}")
            file.write_text(text.replace(fault.old, fault.new))
            failed = failing_test(tree, fault.tests)
            file.write_text(text)
            missed += failed is None
            verdict = "NOT NOTICED" if failed is None else "noticed"
            print(f"{verdict}: {fault.name}: {failed or fault.tests}", flush=True)
    print(f"{len(FAULTS) - missed} of {len(FAULTS)} faults fail a test")
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()

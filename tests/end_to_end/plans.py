"""The servers that tests share: a config, its settings, and changes to the model repository, by the fixture's name."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from end_to_end.servers import ROOT, new_server
from triton_local.server import LocalTriton


@dataclass(frozen=True)
class Plan:
    """A server's config, settings, and changes to the model repository.

    shim, queue_policy, beside: as for `copy_repository`. traced: whether it sends spans to the fixture `spans`.
    """

    variant: str = "default"
    environment: Mapping[str, str] = field(default_factory=dict)
    shim: str = ""
    queue_policy: str = ""
    beside: Sequence[str] = ()
    traced: bool = False


_EMBEDS = {"LLAMA_POOLING": "mean"}
_TWO_SLOTS = {"LLAMA_SLOTS": "2"}
_QUEUE_OF_THREE = (
    "max_queue_size: 3, timeout_action: REJECT, allow_timeout_override: true, "
    # Triton takes a request's own timeout only where it is shorter than this one; 0 is none.
    "default_timeout_microseconds: 600000000"
)
_LATE = {"TRITON_STUCK_SECONDS": "16"}
"""Without a step, until a model counts as dead: a working one must not, beside other tests."""

SOON = {"OTEL_BSP_SCHEDULE_DELAY": "20"}
"""Milliseconds until spans are sent."""

_QUEUE_POLICY = re.compile(r"\bdefault_queue_policy \{[^{}]*\}")

SHARED = {
    # The product as it is: config.pbtxt, INT8, the embedded checkpoint, 32 slots; and the same streaming. Both serve
    # embeddings, too.
    "triton": Plan("default", _EMBEDS),
    "streaming": Plan("streaming", _EMBEDS, traced=True),
    # With the other form of the log.
    "batched_int8": Plan("batched_int8", {"LLAMA_LOG_FORMAT": "json", "LLAMA_LOG_REQUESTS": "prompts"}),
    # For tests that act while a request runs: slow, with two slots and a queue of three; one has the models for other
    # backends' clients.
    "narrow_default": Plan("default", _TWO_SLOTS, "slow_model", _QUEUE_OF_THREE),
    "narrow_streaming": Plan(
        "streaming",
        _TWO_SLOTS,
        "slow_model",
        _QUEUE_OF_THREE,
        beside=("ensemble", "ensemble_uint32", "as_int32", "vllm_model"),
    ),
}
"""Servers that tests of several modules use, and leave as they are."""

PLANS = {
    **SHARED,
    "failing": Plan("streaming", _LATE, "faulty_model"),
    # For a test that kills it.
    "mortal": Plan("streaming", {**_TWO_SLOTS, **_LATE}, "slow_model"),
}


def planned(name: str, folder: Path, environment: Mapping[str, str] = MappingProxyType({})) -> LocalTriton:
    """Return the server of this name, not started.

    folder: an empty one, for a changed model repository. environment: added to the plan's.
    """
    plan = PLANS[name]
    changes = (plan.shim, plan.queue_policy, plan.beside)
    repository = copy_repository(folder, *changes) if any(changes) else None
    options = [f"--load-model={model}" for model in plan.beside]
    return new_server(plan.variant, {**plan.environment, **environment}, repository, options)


def copy_repository(folder: Path, shim: str = "", queue_policy: str = "", beside: Sequence[str] = ()) -> Path:
    """Copy the model repository into an empty folder and return its path.

    shim: the file of this name beside this one replaces model.py and imports it as `real_model`. queue_policy: fields
    of Triton's ModelQueuePolicy, in place of the in-flight configs' own. beside: models of compatibility/.
    """
    repository = folder / "model_repository"
    shutil.copytree(ROOT / "model_repository", repository, ignore=shutil.ignore_patterns("__pycache__"))
    model = repository / "llama"
    if shim:
        (model / "1" / "model.py").rename(model / "1" / "real_model.py")
        shutil.copy(Path(__file__).parent / f"{shim}.py", model / "1" / "model.py")
    if queue_policy:
        for config in (model / "config.pbtxt", model / "configs" / "streaming.pbtxt"):
            text, count = _QUEUE_POLICY.subn(f"default_queue_policy {{ {queue_policy} }}", config.read_text())
            assert count == 1
            config.write_text(text)
    for name in beside:
        shutil.copytree(ROOT / "compatibility" / name, repository / name)
    return repository

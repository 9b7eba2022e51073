"""The rank and the scaling of each linear layer of a LoRA adapter, from PEFT's adapter_config.json.

Names are matched as PEFT matches them, so that exactly the layers that PEFT would change are changed. Whatever would
make the adapter more than y += scaling · (x·Aᵀ)·Bᵀ is refused. Source: tuners/lora/config.py,
tuners/lora/model.py and tuners/tuners_utils.py in PEFT 0.21.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple

import regex

from llama_engine.bounds import Flag, Integer, Real, show
from llama_engine.checkpoint.config_bounds import check_value, refuse
from llama_engine.checkpoint.json_files import read_object
from llama_engine.errors import CheckpointError, one_line

CONFIG = "adapter_config.json"
MAX_RANK = 128

_RANK, _ALPHA, _LAYER = Integer(1, MAX_RANK), Real(low=-1e6, high=1e6), Integer(0, 1 << 12)

_USED = {
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules",
    "layers_to_transform", "layers_pattern", "init_lora_weights",
}  # fmt: skip

_IRRELEVANT = {
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
    "qalora_group_size", "ensure_weight_tying", "runtime_config",
}  # fmt: skip
"""Fields for training, for labels, or with an effect only beside a field or a tensor that is refused."""

_KEEPING = ("gaussian", "eva", "orthogonal", "mica")
"""Values of init_lora_weights that leave the base's weights as they are; PiSSA, OLoRA, CorDA, LoRA-GA, LoftQ don't."""

_EMBEDDINGS = ("model.embed_tokens", "lm_head")

_MAX_PATTERN = 10_000
"""Maximum characters of a regular expression."""

_SIMPLE = re.compile(
    r"(?:[^\\\[\]{})]|\\[^\[\]{}]|\)(?![*+{])|\{\d{0,2}(?:,\d{0,2})?\}|\[(?:[^\\\[\]{}&~|-]|\\[\w.]|-(?!-))*\])*"
)
"""Regular expressions that mean the same to `regex` as to `re`, and whose matching `regex` ends at its timeout."""

_MAX_SECONDS = 2.0
"""Maximum seconds for matching an adapter's regular expressions, which can take exponential time."""


class LoraShape(NamedTuple):
    """An adapter's rank and scaling in a linear layer."""

    rank: int
    scaling: float


def read_lora_config(path: Path, linears: Sequence[str], max_rank: int) -> Mapping[str, LoraShape]:
    """Return rank and scaling of each linear layer that an adapter changes, by name.

    path: adapter_config.json. linears: names of the base's linear layers, such as model.layers.0.self_attn.q_proj.
    Raises CheckpointError naming the field, its value and the bound.
    """
    values, where = read_object(path, max_file_bytes(len(linears))), f"{path.parent}: {path.name}"
    _check_plain(values, where)
    matcher = _Matcher(where, len(linears))
    rank, alpha = values.get("r", 8), values.get("lora_alpha", 8)
    check_value(where, "r", rank, _RANK)
    check_value(where, "lora_alpha", alpha, _ALPHA)
    rslora = check_value(where, "use_rslora", values.get("use_rslora", False), Flag())
    ranks, alphas = (_patterns(values, where, field, matcher) for field in ("rank_pattern", "alpha_pattern"))
    shapes = {}
    for name in _targets(values, where, linears, matcher):
        layer_rank = next((value for pattern, value in ranks if matcher.matches("rank_pattern", pattern, name)), rank)
        layer_alpha = next(
            (value for pattern, value in alphas if matcher.matches("alpha_pattern", pattern, name)), alpha
        )
        if layer_rank > max_rank:
            refuse(where, f"r of {name}", layer_rank, f"at most {max_rank}, the setting max_lora_rank")
        shapes[name] = LoraShape(layer_rank, layer_alpha / (sqrt(layer_rank) if rslora else layer_rank))
    return shapes


def max_file_bytes(linears: int) -> int:
    """Return the maximum size of the config, or of the tensors' header, of an adapter of a base's linear layers."""
    return 1_000_000 + 2000 * linears


def _check_plain(values: Mapping[str, Any], where: str) -> None:
    """Refuse what isn't plain LoRA."""
    if values.get("peft_type") != "LORA":
        refuse(where, "peft_type", values.get("peft_type"), "LORA")
    start = values.get("init_lora_weights", True)
    if (start.lower() if isinstance(start, str) else start) not in (None, True, False, *_KEEPING):
        refuse(where, "init_lora_weights", start, f"true, false or one of {', '.join(_KEEPING)}, which keep the base")
    for field in sorted(values.keys() - _USED - _IRRELEVANT):
        if values[field] not in (None, False, [], {}) and (field, values[field]) != ("bias", "none"):
            raise CheckpointError(
                f"can't load {where}: {show(field)} is {show(values[field])}; only adapters without it are served"
            )


def _patterns(
    values: Mapping[str, Any], where: str, field: str, matcher: _Matcher
) -> list[tuple[regex.Pattern[str], Any]]:
    """Return the regular expressions and the values of rank_pattern or alpha_pattern, in order."""
    patterns = values.get(field) or {}
    if not isinstance(patterns, dict) or len(patterns) > matcher.max_patterns:
        refuse(where, field, patterns, f"an object of at most {matcher.max_patterns} patterns")
    for key, value in patterns.items():
        check_value(where, f"{field} of {show(key)}", value, _RANK if field == "rank_pattern" else _ALPHA)
    return [(matcher.compile(field, rf"(.*\.)?({key})$"), value) for key, value in patterns.items()]


def _targets(values: Mapping[str, Any], where: str, linears: Sequence[str], matcher: _Matcher) -> list[str]:
    """Return the names of the linear layers that an adapter changes. Raises CheckpointError if there are none."""
    modules, layers = values.get("target_modules"), values.get("layers_to_transform")
    indices = layers if isinstance(layers, list) else [] if layers is None else [layers]
    chosen = {check_value(where, "layers_to_transform", index, _LAYER) for index in indices}
    pattern = values.get("layers_pattern") or "layers"
    if chosen and (isinstance(modules, str) or pattern not in ("layers", ["layers"])):
        refuse(where, "layers_to_transform", layers, "null beside a text in target_modules, or a layers_pattern")
    is_target = matcher.selector("target_modules", modules)
    is_excluded = matcher.selector("exclude_modules", values.get("exclude_modules") or [])
    for name in _EMBEDDINGS:
        if is_target(name) and not is_excluded(name):
            raise CheckpointError(f"can't load {where}: target_modules has {name}; adapters of it are not served")
    targets = [
        name
        for name in linears
        if is_target(name)
        and not is_excluded(name)
        # PEFT ignores layers_to_transform for a layer whose whole name is in target_modules.
        and (not chosen or name in (modules or ()) or int(name.split(".")[2]) in chosen)
    ]
    if not targets:
        refuse(where, "target_modules", modules, f"names of linear layers of the base, such as {linears[0]}")
    return targets


class _Matcher:
    """Matches names against an adapter's fields, within _MAX_SECONDS for all regular expressions."""

    def __init__(self, where: str, linears: int) -> None:
        self.max_patterns = linears
        self._where = where
        self._deadline = time.monotonic() + _MAX_SECONDS

    def compile(self, field: str, pattern: str) -> regex.Pattern[str]:
        """Return a compiled regular expression. Raises CheckpointError if it is invalid."""
        if len(pattern) > _MAX_PATTERN or not _SIMPLE.fullmatch(pattern):
            bound = f"of at most {_MAX_PATTERN} characters, without repeated groups and counts of 100 or more"
            refuse(self._where, field, pattern, f"a regular expression {bound}")
        try:
            # Refuses what `regex` knows and `re`, by which PEFT matches, does not, such as recursion.
            re.compile(pattern)
            return regex.compile(pattern)
        except (re.error, regex.error, RecursionError, OverflowError, ValueError) as error:
            refuse(self._where, field, pattern, f"a regular expression ({one_line(error)})")

    def matches(self, field: str, pattern: regex.Pattern[str], name: str) -> bool:
        """Return whether a regular expression matches a whole name. Raises CheckpointError if that takes too long."""
        try:
            # With `concurrent` other threads run meanwhile.
            return bool(pattern.fullmatch(name, timeout=max(self._deadline - time.monotonic(), 1e-3), concurrent=True))
        except TimeoutError:
            refuse(self._where, field, pattern.pattern, f"one that is matched within {_MAX_SECONDS:g} s")

    def selector(self, field: str, names: object) -> Callable[[str], bool]:
        """Return whether a name is one that a field means: PEFT's list of names' ends, or a regular expression."""
        if isinstance(names, str):
            if names.lower() == "all-linear":
                return lambda name: name not in _EMBEDDINGS
            pattern = self.compile(field, names)
            return lambda name: self.matches(field, pattern, name)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            refuse(self._where, field, names, "a list of names or a regular expression")
        ends = set(names)
        return lambda name: any(name.split(".", count)[-1] in ends for count in range(name.count(".") + 1))

"""A damaged checkpoint is served or refused in one line: no other exception, no crash, no hang, bounded memory."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import struct
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine.checkpoints import save_small
from engine.engines import engine_of, load
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llama_engine.errors import CheckpointError, InvalidSettings, OutOfMemoryPlan
from llama_engine.request.parser import GenerationRequest
from llama_engine.text.tokenizer import Tokenizer
from notes import Note
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from models import gguf_checkpoints, quantized_checkpoints

MAX_MEMORY = 3 << 30
"""Bytes of address space that loading and a few tokens may take, beside what a process with PyTorch has."""

DEEP: Any = "a"
for _ in range(900):
    DEEP = [DEEP]

VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 3, 7, 2**16, 2**31, 2**63, 2**64, 10**18, 10**400, -(10**18)),
    *(0.5, -0.0, 1e308, 1e-320, float("nan"), float("inf"), -float("inf")),
    *("", "64", "nan", "../x", "/etc/passwd", "a\nb\x1b[2J", "\ud800", "x" * 100_000, "model.safetensors"),
    *([], [[]], [0], [-1, 2**64], ["a"], {}, {"a": 1}, list(range(1000)), DEEP),
)

DTYPES = ("I8", "F16", "F64", "U8", "F8_E4M3", "I64", "F4", "BOOL")

Damage = Callable[[Path, random.Random], str]
"""Changes a copy of a checkpoint; returns what was changed."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> list[Path]:
    """A checkpoint in each format, of sizes that each format's groups and blocks have."""
    parent = tmp_path_factory.mktemp("checkpoints")
    source = save_small(parent / "source", tokenizer, hidden_size=256, intermediate_size=256, head_dim=64)
    int8 = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    for name, config, shard in (("files", None, "3MB"), ("int8", int8, "1GB"), ("nf4", nf4, "1GB")):
        options = {} if config is None else {"quantization_config": config}
        saved = AutoModelForCausalLM.from_pretrained(source, **options)
        saved.save_pretrained(parent / name, max_shard_size=shard)
        tokenizer.pretrained.save_pretrained(parent / name)
    for name in ("w8a8", "w4a16", "gptq4-act-order", "awq4", "fp8"):
        quantized_checkpoints.write(source, name, parent / name)
    for name in ("q8_0", "q4_k_m"):
        (parent / name).mkdir()
        gguf_checkpoints.write(source, name, parent / name / "model.gguf")
    return sorted(parent.iterdir())


def change_bytes(folder: Path, draw: random.Random) -> str:
    """Flip bits, or put a number there that is large, negative or 0; half of them where a header is."""
    path = draw.choice(_files(folder))
    content = bytearray(path.read_bytes())
    begin = draw.randrange(min(len(content), draw.choice((64, 4000, len(content), len(content)))))
    if draw.random() < 0.5:
        content[begin] ^= 1 << draw.randrange(8)
    else:
        layout, number = draw.choice((("<I", 0), ("<I", 2**31), ("<I", 2**32 - 1), ("<Q", 2**40), ("<Q", 2**63)))
        content[begin : begin + struct.calcsize(layout)] = struct.pack(layout, number)
    path.write_bytes(content)
    return f"{path.name} at {begin}"


def change_size(folder: Path, draw: random.Random) -> str:
    path = draw.choice(_files(folder))
    content = path.read_bytes()
    end = draw.choice((0, 1, 7, 8, 9, len(content) // 2, len(content) - 1, draw.randrange(len(content))))
    path.write_bytes(draw.choice((content[:end], content + bytes(end), content[end:])))
    return f"{path.name} at {end}"


def change_json(folder: Path, draw: random.Random) -> str:
    names = [path for path in _files(folder) if path.suffix == ".json"]
    # Half of them config.json, from which sizes come.
    path = folder / "config.json" if draw.random() < 0.5 else draw.choice(names)
    content = json.loads(path.read_text())
    changed = [_change(content, draw) for _ in range(draw.choice((1, 1, 1, 3))) if content]
    path.write_text(json.dumps(content))
    return f"{path.name}: {', '.join(changed)}"


def change_header(folder: Path, draw: random.Random) -> str:
    path, header, data = _weights(folder, draw)
    tensors = [entry for name, entry in header.items() if name != "__metadata__"]
    field = draw.choice(("dtype", "shape", "data_offsets", "any", "name", "length", "twice"))
    name, text, length = draw.choice([*header]), "", None
    if field == "any":
        _change(header, draw)
    elif field == "name":
        header[draw.choice(("", "a\nb", "\ud800", "x" * 2000, *header))] = header.pop(name)
    elif field == "twice":
        text = json.dumps(header)[:-1] + f", {json.dumps(name)}: {json.dumps(header[name])}}}"
    elif field == "length":
        length = draw.choice((0, 1, 2**31, 2**63))
    else:
        value = draw.choice(DTYPES if field == "dtype" and draw.random() < 0.5 else VALUES)
        draw.choice(tensors)[field] = draw.choice((value, draw.choice(tensors)[field]))
    _write_weights(path, text or json.dumps(header), data, length)
    return f"{path.name}: {field} of {name}"


def change_data(folder: Path, draw: random.Random) -> str:
    path, header, data = _weights(folder, draw)
    changed = bytearray(data)
    name = draw.choice([name for name in header if name != "__metadata__"])
    begin, end = header[name]["data_offsets"]
    fill = draw.choice((b"\0", b"\xff", b"\x7f", b"\x80", struct.pack("<f", float("nan")), struct.pack("<f", 1e38)))
    changed[begin:end] = (fill * (end - begin))[: end - begin]
    _write_weights(path, json.dumps(header), bytes(changed))
    return f"{name} is {fill!r}"


def change_files(folder: Path, draw: random.Random) -> str:
    path, other = draw.choice(_files(folder)), draw.choice(_files(folder))
    content = path.read_bytes(), other.read_bytes()
    way = draw.choice(("remove", "swap", "empty", "folder", "pipe", "link", "loop"))
    path.unlink()
    if way == "swap":
        path.write_bytes(content[1])
        other.write_bytes(content[0])
    elif way == "empty":
        path.touch()
    elif way == "folder":
        path.mkdir()
    elif way == "pipe":
        os.mkfifo(path)
    elif way in ("link", "loop"):
        path.symlink_to("/dev/zero" if way == "link" else path.name)
    return f"{way} {path.name} {other.name}"


DAMAGES: tuple[Damage, ...] = (
    *(change_bytes, change_bytes, change_size, change_json, change_json, change_json),
    *(change_header, change_header, change_header, change_data, change_files),
)
GGUF_DAMAGES: tuple[Damage, ...] = (change_bytes, change_bytes, change_bytes, change_size, change_files)


def _change(content: dict[Any, Any] | list[Any], draw: random.Random) -> str:
    """Replace or remove a value at a random place of an object or list; return where."""
    place: Any = draw.choice([*content] if isinstance(content, dict) else range(len(content)))
    if isinstance(content[place], dict | list) and content[place] and draw.random() < 0.7:
        return f"{place}.{_change(content[place], draw)}"
    if draw.random() < 0.15:
        del content[place]
        return f"no {place}"
    content[place] = draw.choice(VALUES)
    return f"{place}={str(content[place])[:40]!r}"


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())


def _weights(folder: Path, draw: random.Random) -> tuple[Path, dict[str, Any], bytes]:
    """Return a random file of weights, its header and its data."""
    path = draw.choice([path for path in _files(folder) if path.suffix == ".safetensors"])
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return path, json.loads(content[8:end]), content[end:]


def _write_weights(path: Path, header: str, data: bytes, length: int | None = None) -> None:
    encoded = header.encode()
    path.write_bytes(struct.pack("<Q", len(encoded) if length is None else length) + encoded + data)


def _load_and_generate(folder: Path, quantization: str) -> None:
    """Load a checkpoint as a server does, and generate a few tokens."""
    engine = engine_of(load(quantization, model=str(folder)), 1)
    # Fails or not: values that aren't finite have no token.
    list(engine.generate([GenerationRequest(prompt="", prompt_tokens=(1, 5, 6), max_tokens=2)]))


@pytest.fixture(scope="module")
def bounded(folders: list[Path]) -> Iterator[list[Path]]:
    """The checkpoints; address space is bounded once each has been served."""
    for folder in folders:
        _load_and_generate(folder, "checkpoint")
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (int(status["VmSize"].split()[0]) * 1024 + MAX_MEMORY, before[1]))
    yield folders
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("examples", [60, pytest.param(1000, marks=[pytest.mark.long, pytest.mark.timeout(1200)])])
def test_damaged_checkpoints_are_served_or_refused(bounded: list[Path], examples: int, note: Note) -> None:
    outcomes = Counter[str]()

    @settings(
        max_examples=examples, deadline=60_000, derandomize=True, database=None, suppress_health_check=[*HealthCheck]
    )
    @given(st.sampled_from(bounded), st.randoms(use_true_random=True))
    def check(folder: Path, draw: random.Random) -> None:
        is_gguf = not (folder / "config.json").exists()
        in_floats = not is_gguf and "quantization_config" not in json.loads((folder / "config.json").read_text())
        with tempfile.TemporaryDirectory() as parent:
            copy = Path(shutil.copytree(folder, Path(parent) / "copy"))
            damage = draw.choice(GGUF_DAMAGES if is_gguf else DAMAGES)(copy, draw)
            message = ""
            try:
                _load_and_generate(copy, draw.choice(("int8", "none")) if in_floats else "checkpoint")
            except (CheckpointError, InvalidSettings, OutOfMemoryPlan) as error:
                message = str(error)
            outcomes["refused" if message else "served"] += 1
            assert not message or (message.isprintable() and len(message) < 5000), damage

    check()
    note(f"{outcomes.total()} damaged checkpoints: {outcomes['refused']} refused, {outcomes['served']} served")
    assert outcomes.total() // 3 < outcomes["refused"] < outcomes.total()

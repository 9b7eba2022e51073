"""Damages checkpoints, each in one way that follows from a seed, and loads them: a program, as one may end with it.

    python -m engine.hostile_checkpoints FIRST END FOLDER...

Takes the folders in turn. For each seed from FIRST to END - 1 prints a line of JSON: seed, folder, damage, outcome
(served, refused or the type of another exception) and message.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from llama_engine.errors import CheckpointError, InvalidSettings, OutOfMemoryPlan

REFUSALS = (CheckpointError, InvalidSettings, OutOfMemoryPlan)

MAX_MEMORY = 3 << 30
"""Bytes of address space that loading and a few tokens may take, beside what a process with PyTorch has."""

MAX_SECONDS = 60

INDEX = "model.safetensors.index.json"
DEEP: Any = "a"
for _ in range(900):
    DEEP = [DEEP]

VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 3, 7, 2**16, 2**31, 2**63, 2**64, 10**18, 10**400, -(10**18)),
    *(0.5, -0.0, 1e308, 1e-320, float("nan"), float("inf"), -float("inf")),
    *("", "64", "nan", "../x", "/etc/passwd", "a\nb\x1b[2J", "\ud800", "x" * 100_000, "model.safetensors"),
    *([], [[]], [0], [-1, 2**64], ["a"], {}, {"a": 1}, list(range(1000)), DEEP),
)

Damage = Callable[[Path, random.Random], str]


def flip_bytes(folder: Path, draw: random.Random) -> str:
    path = _any_file(folder, draw)
    content = bytearray(path.read_bytes())
    # The header of a file of weights is at its beginning.
    end = len(content) if draw.random() < 0.5 else min(len(content), 4000)
    for _ in range(draw.choice((1, 1, 2, 20))):
        content[draw.randrange(end)] ^= 1 << draw.randrange(8)
    path.write_bytes(content)
    return path.name


def overwrite_number(folder: Path, draw: random.Random) -> str:
    """Replace bytes by a number that is large, negative or 0, mostly where a header is."""
    path = _any_file(folder, draw)
    content = bytearray(path.read_bytes())
    begin = draw.randrange(min(len(content), draw.choice((64, 1000, 4000, len(content)))))
    layout, number = draw.choice((("<I", 0), ("<I", 2**31), ("<I", 2**32 - 1), ("<Q", 0), ("<Q", 2**40), ("<Q", 2**63)))
    content[begin : begin + struct.calcsize(layout)] = struct.pack(layout, number)
    path.write_bytes(content)
    return f"{path.name} at {begin}: {number}"


def change_size(folder: Path, draw: random.Random) -> str:
    path = _any_file(folder, draw)
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
    name = draw.choice([*header])
    field = draw.choice(("dtype", "shape", "data_offsets", "entry", "name", "length", "twice", "gone"))
    text = None
    if field == "entry":
        header[name] = draw.choice(VALUES)
    elif field == "gone":
        del header[name]
    elif field == "name":
        header[draw.choice(("", "a\nb", "\ud800", "x" * 2000, *header))] = header.pop(name)
    elif field == "twice":
        text = json.dumps(header)[:-1] + f", {json.dumps(name)}: {json.dumps(header[name])}}}"
    elif field != "length":
        others = [entry[field] for entry in header.values() if field in entry]
        value = header[name].get(field)
        lists = (
            [[*value[:-1], draw.choice(VALUES)], [draw.choice(VALUES), *value[1:]]] if isinstance(value, list) else []
        )
        dtypes = ["I8", "F16", "F64", "U8", "F8_E4M3", "I64", "F4", "BOOL"] if field == "dtype" else []
        header[name][field] = draw.choice([draw.choice(VALUES), draw.choice(others), *lists, *dtypes])
    encoded = (text or json.dumps(header)).encode()
    length = draw.choice((0, 1, 2**31, 2**63, len(encoded) * 2)) if field == "length" else len(encoded)
    path.write_bytes(struct.pack("<Q", length) + encoded + data)
    return f"{path.name}: {field} of {name}"


def change_data(folder: Path, draw: random.Random) -> str:
    path, header, data = _weights(folder, draw)
    changed = bytearray(data)
    name = draw.choice([name for name in header if name != "__metadata__"])
    begin, end = header[name]["data_offsets"]
    fill = draw.choice((b"\0", b"\xff", b"\x7f", b"\x80", struct.pack("<f", float("nan")), struct.pack("<f", 1e38)))
    changed[begin:end] = (fill * (end - begin))[: end - begin]
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + changed)
    return f"{name} is {fill!r}"


def change_files(folder: Path, draw: random.Random) -> str:
    path, other = _any_file(folder, draw), _any_file(folder, draw)
    way = draw.choice(("remove", "copy", "swap", "folder", "pipe", "empty", "link", "loop"))
    if way == "copy":
        other.write_bytes(path.read_bytes())
    elif way == "swap":
        first, second = path.read_bytes(), other.read_bytes()
        path.write_bytes(second)
        other.write_bytes(first)
    elif way == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
    if way == "folder":
        path.mkdir()
    elif way == "pipe":
        os.mkfifo(path)
    elif way in ("link", "loop"):
        path.symlink_to("/dev/zero" if way == "link" else path.name)
    return f"{way} {path.name} {other.name}"


def change_index(folder: Path, draw: random.Random) -> str:
    """Change a file name of the index; in a folder without one, make one of a file elsewhere."""
    index, weights = folder / INDEX, folder / "model.safetensors"
    if weights.exists():
        weights.rename(folder.parent / "outside.safetensors")
        index.write_text(
            json.dumps({"weight_map": {"a": draw.choice(("../outside.safetensors", "outside.safetensors"))}})
        )
        return "an index of a file outside"
    content = json.loads(index.read_text())
    name = draw.choice([*content["weight_map"]])
    value = draw.choice((*VALUES, "..", "./model.safetensors", "/x.safetensors", "config.json", "x.safetensors"))
    content["weight_map"][name] = value
    index.write_text(json.dumps(content))
    return f"{name} in {str(value)[:40]!r}"


DAMAGES: tuple[Damage, ...] = (
    *(flip_bytes, overwrite_number, change_size, change_json, change_json, change_json),
    *(change_header, change_header, change_header, change_data, change_files, change_index),
)

OF_ANY_FILES: tuple[Damage, ...] = (
    flip_bytes,
    flip_bytes,
    overwrite_number,
    overwrite_number,
    change_size,
    change_files,
)
"""Those of a GGUF file."""


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


def _any_file(folder: Path, draw: random.Random) -> Path:
    return draw.choice(_files(folder))


def _weights(folder: Path, draw: random.Random) -> tuple[Path, dict[str, Any], bytes]:
    """Return a random file of weights, its header and its data."""
    path = draw.choice([path for path in _files(folder) if path.suffix == ".safetensors"])
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return path, json.loads(content[8:end]), content[end:]


def load_and_generate(folder: Path, quantization: str) -> None:
    """Load a checkpoint as a server does, and generate a few tokens."""
    # Imported here because the limit of memory is set before.
    from engine.engines import engine_of, load
    from llama_engine.request.parser import GenerationRequest

    engine = engine_of(load(quantization, model=str(folder)), 1)
    # Fails or not: values that aren't finite have no token.
    list(engine.generate([GenerationRequest(prompt="", prompt_tokens=(1, 5, 6), max_tokens=2)]))


def main(folders: list[Path], first: int, end: int) -> None:
    torch.set_num_threads(1)
    for folder in folders:
        load_and_generate(folder, "checkpoint")
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    limit = int(status["VmSize"].split()[0]) * 1024 + MAX_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    for seed in range(first, end):
        draw, folder = random.Random(seed), folders[seed % len(folders)]
        is_gguf = not (folder / "config.json").exists()
        in_floats = not is_gguf and "quantization_config" not in json.loads((folder / "config.json").read_text())
        with tempfile.TemporaryDirectory() as parent:
            copy = Path(shutil.copytree(folder, Path(parent) / "copy"))
            damage = draw.choice(OF_ANY_FILES if is_gguf else DAMAGES)
            line = {"seed": seed, "folder": folder.name, "damage": f"{damage.__name__}: {damage(copy, draw)}"}
            # Ends the process, so that the line of this seed is missing.
            signal.alarm(MAX_SECONDS)
            print(json.dumps(line), file=sys.stderr, flush=True)
            try:
                load_and_generate(copy, draw.choice(("int8", "none")) if in_floats else "checkpoint")
                outcome, message = "served", ""
            except REFUSALS as error:
                outcome, message = "refused", str(error)
            except BaseException as error:  # noqa: BLE001 - the outcome that there must not be
                outcome, message = type(error).__name__, str(error)
            print(json.dumps({**line, "outcome": outcome, "message": message}), flush=True)


if __name__ == "__main__":
    main([Path(folder) for folder in sys.argv[3:]], int(sys.argv[1]), int(sys.argv[2]))

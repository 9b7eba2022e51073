"""Random damages of a checkpoint's or an adapter's files, and a limit of the memory that reading them may take."""

from __future__ import annotations

import json
import os
import random
import resource
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


@contextmanager
def memory_of_at_most(size: int) -> Iterator[None]:
    """Limit this process to `size` bytes of address space beside what it has."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (int(status["VmSize"].split()[0]) * 1024 + size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


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
    config = folder / "config.json"
    # Half of them config.json, from which sizes come.
    path = config if config.exists() and draw.random() < 0.5 else draw.choice(names)
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

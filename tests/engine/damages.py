"""Random damages of a checkpoint's or an adapter's files, and a limit of the memory that reading them may take."""

import json
import os
import random
import resource
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DAMAGED_CHECKPOINTS = int(os.environ.get("DAMAGED_CHECKPOINTS", "50"))
"""Damaged checkpoints of a run; damaged adapters are five times as many. 1,000 take minutes."""

DEEP: Any = "a"
for _ in range(900):
    DEEP = [DEEP]

VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 3, 7, 2**16, 2**31, 2**63, 2**64, 10**18, 10**400, -(10**18)),
    *(0.5, -0.0, 1e308, 1e-320, float("nan"), float("inf"), -float("inf")),
    *("", "64", "nan", "../x", "/etc/passwd", "a\nb\x1b[2J", "\ud800", "x" * 100_000, "model.safetensors"),
    *("I8", "F16", "F64", "U8", "F8_E4M3", "I64", "F4", "BOOL"),
    *([], [[]], [0], [-1, 2**64], ["a"], {}, {"a": 1}, list(range(1000)), DEEP),
)
"""JSON of every type; among the texts are dtypes of safetensors."""

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
    """Put a number there that is large, negative or 0, or a float that isn't finite; half of them in a header."""
    path = draw.choice(_files(folder))
    content = bytearray(path.read_bytes())
    begin = draw.randrange(min(len(content), draw.choice((64, 4000, len(content), len(content)))))
    numbers = (b"\0\0\0\0", b"\0\0\0\x80", b"\xff" * 4, struct.pack("<Q", 2**40), struct.pack("<f", float("nan")))
    changed = draw.choice((bytes([content[begin] ^ 1 << draw.randrange(8)]), *numbers))
    content[begin : begin + len(changed)] = changed
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
    """Change a value in the header of a file of weights, whose length is then right."""
    path = draw.choice([path for path in _files(folder) if path.suffix == ".safetensors"])
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    changed = _change(header, draw)
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + content[end:])
    return f"{path.name}: {changed}"


def change_files(folder: Path, draw: random.Random) -> str:
    path, other = draw.choice(_files(folder)), draw.choice(_files(folder))
    content = other.read_bytes()
    way = draw.choice(("remove", "another", "folder", "pipe", "link", "loop"))
    path.unlink()
    if way == "another":
        path.write_bytes(content)
    elif way == "folder":
        path.mkdir()
    elif way == "pipe":
        os.mkfifo(path)
    elif way in ("link", "loop"):
        path.symlink_to("/dev/zero" if way == "link" else path.name)
    return f"{way} {path.name} {other.name}"


GGUF_DAMAGES: tuple[Damage, ...] = (change_bytes, change_bytes, change_bytes, change_size, change_files)
DAMAGES: tuple[Damage, ...] = (*GGUF_DAMAGES, *(change_json,) * 4, *(change_header,) * 4)


def _change(content: dict[Any, Any] | list[Any], draw: random.Random) -> str:
    """Replace or remove a value at a random place of an object or list; return where."""
    place: Any = draw.choice([*content] if isinstance(content, dict) else range(len(content)))
    if isinstance(content[place], dict | list) and content[place] and draw.random() < 0.7:
        return f"{place}.{_change(content[place], draw)}"
    if draw.random() < 0.15:
        del content[place]
        return f"no {place}"
    content[place] = draw.choice((*VALUES, draw.choice([*content.values()] if isinstance(content, dict) else content)))
    return f"{place}={str(content[place])[:40]!r}"


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())

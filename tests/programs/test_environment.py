"""The memory of a process and its descendants."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from perf.environment import family, memory_of

HOLDS = """
import sys
held = bytearray(64 << 20)
held[::4096] = bytes([1]) * len(held[::4096])  # every page is written to, so that it is resident
print("!", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="VRAM is measured where there is a GPU")
def test_the_memory_of_a_process_includes_its_children_while_they_run() -> None:
    kind, before = memory_of(os.getpid())
    assert kind == "PSS"
    with subprocess.Popen([sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"!\n"
        assert family(os.getpid())[0] == os.getpid()
        assert child.pid in family(os.getpid())
        (_, held), (_, alone) = memory_of(os.getpid()), memory_of(child.pid)
        child.communicate()
    assert alone > 64
    assert held - before > 60
    with pytest.raises(FileNotFoundError):
        memory_of(child.pid)

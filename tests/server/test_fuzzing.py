"""Hostile requests and random bytes on both ports cause no crash, hang, server error or leak, and change no answer.

`make hostile` sends any number, from any seed. An attack with a wrong answer is shrunk; one that ends the server can't
be, and the failure shows those sent last.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from notes import Note
from server.fuzzing.drawing import all_attacks, drawn
from server.fuzzing.siege import WARM_UP, Siege, unary_of
from triton_local.server import LocalTriton

SEED = int(os.environ.get("FUZZ_SEED", "20261122"))


# Attacks that hang take minutes; the failure has to name them before the time is up.
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("count", "documented"), [(200, 0), pytest.param(5_000, 3, marks=pytest.mark.campaign)])
def test_hostile_requests_neither_crash_nor_hang_nor_leak_nor_change_other_answers(
    fuzzed: LocalTriton, fuzzed_streaming: LocalTriton, note: Note, count: int, documented: int
) -> None:
    """count: of attacks on each of the two servers. documented: their weight."""
    servers = (fuzzed, fuzzed_streaming)
    batches = []
    for number, server in enumerate(servers):
        attacks = all_attacks(unary_of(server), documented)
        first = int(WARM_UP * count)
        batches.append([drawn(attacks, size, SEED + 2 * number + i) for i, size in enumerate((first, count - first))])

    def survives(number: int) -> Siege:
        siege = Siege(servers[number])
        for batch in batches[number]:
            siege.run(batch)
        siege.finish()
        return siege

    with ThreadPoolExecutor(2) as pool:
        for siege in pool.map(survives, range(2)):
            assert siege.failures == []
            assert siege.sent == count
            said = f"{siege.asked} good requests, {siege.computed:g} computed, {siege.refused:g} refused"
            note(f"{count} attacks, seed {SEED}: {said}; {siege.by_route()}")

"""Philox4x32-10 against the known answers of its authors' library, Random123 (kat_vectors)."""

import numpy as np
from llama_engine.sampling.philox import philox4x32, step_keys

ONES = 0xFFFFFFFF
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def test_it_is_not_philox() -> None:
    counters = np.array([counter for counter, _, _ in KNOWN], dtype=np.uint64)
    keys = np.array([low | high << 32 for _, (low, high), _ in KNOWN], dtype=np.uint64)
    assert philox4x32(keys, counters).tolist() == [list(answer) for _, _, answer in KNOWN]


def test_keys_repeat_or_ignore_a_part_of_the_seed() -> None:
    seeds = np.array([0, 1, 2**31, 2**32, 2**32 + 1, 2**63, 2**64 - 1], dtype=np.uint64)
    steps = np.arange(2000)
    grid = [step_keys(seeds, np.full(len(seeds), step)) for step in steps]
    words = np.concatenate(grid)
    assert words.min() >= 0
    assert words.max() < 2**32
    assert len({tuple(pair) for pair in words.tolist()}) == len(seeds) * len(steps)


def test_a_rows_key_depends_on_its_place() -> None:
    seeds, steps = np.array([5, 6, 7], dtype=np.uint64), np.array([10, 20, 30])
    together = step_keys(seeds, steps)
    for row in range(3):
        assert step_keys(seeds[row : row + 1], steps[row : row + 1]).tolist() == [together[row].tolist()]

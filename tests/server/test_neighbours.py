"""Requests with different parameters in one batch of Triton's: each gets its own text, the one it gets alone."""

from __future__ import annotations

from functools import partial

from server.crowd import FULL_SET, batches_of, in_one_batch
from server.servers import Statistics
from server.wires import WIRES, ask
from triton_local.server import LocalTriton

PROMPTS = (
    "Return a list of the",
    "The class",
    "Raise",
    "This module provides",
    "An exception",
    "If the argument is not given, then",
    "def",
    "Open the file and read its lines, one by one, until",
    "None",
    "When an instance of a class is created, its method",
    "x",
    "Iterators",
    "A string is",
    "Note that",
    "The default value of the second argument, which may be omitted, is",
    "for",
)


def _request(index: int) -> dict[str, object]:
    """Return a request that differs from the fifteen others in everything."""
    return {
        **FULL_SET,
        "text_input": PROMPTS[index],
        "max_tokens": 4 + 2 * index,
        "min_tokens": index,
        "temperature": (0.0, 0.7, 1.3, 2.0)[index % 4],
        "top_k": (0, 50, 7)[index % 3],
        "top_p": (1.0, 0.9)[index % 2],
        "repetition_penalty": (1.0, 1.3, 0.9)[index % 3],
        "frequency_penalty": (0.0, 0.5, -0.5, 0.0, 1.0)[index % 5],
        "presence_penalty": (0.0, 0.3)[index % 2],
        "seed": 1000 + index,
        "stop_words": [[""], ["\n"], ["e", "qqq"]][index % 3],
        "bad_words": [[""], ["the", "a"]][index % 2],
        "exclude_input_in_output": index % 4 != 1,
    }


def test_every_request_of_a_batch_gets_the_text_it_gets_alone(triton: LocalTriton) -> None:
    requests = [_request(index) for index in range(len(PROMPTS))]
    alone = [ask(triton, **request) for request in requests]
    statistics = Statistics(triton)
    jobs = [partial(ask, triton, WIRES[index % 4], **request) for index, request in enumerate(requests)]
    together = in_one_batch(triton, jobs)
    batches = batches_of(triton, statistics)
    assert max(batches) >= 8, f"the requests were to share batches: {batches}"
    assert together == alone


def test_sixteen_requests_at_once_are_executed_in_batches(triton: LocalTriton) -> None:
    statistics = Statistics(triton)
    request = {**FULL_SET, "text_input": "Return", "max_tokens": 4}
    in_one_batch(triton, [partial(ask, triton, WIRES[index % 4], **request) for index in range(16)])
    batches = batches_of(triton, statistics)
    assert max(batches) > 1
    assert sum(size * count for size, count in batches.items()) == 16
    # Two more kept the model busy.
    assert sum(batches.values()) + 2 == statistics.executions()


def test_stop_words_of_unequal_number_do_not_split_a_batch(triton: LocalTriton) -> None:
    statistics = Statistics(triton)
    requests = [
        {**FULL_SET, "text_input": "Return", "max_tokens": 4, "stop_words": ["?!"] * count, "bad_words": ["?!"] * count}
        for count in range(1, 17)
    ]
    in_one_batch(triton, [partial(ask, triton, **request) for request in requests])
    batches = batches_of(triton, statistics)
    assert max(batches) >= 8, batches

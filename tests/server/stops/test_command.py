"""The command that a result of `make stops` records."""

from __future__ import annotations

import pytest
from server.stops.__main__ import command, matrix_parser


@pytest.mark.parametrize(
    ("arguments", "recorded"),
    [
        ("", "make stops"),
        ("--budget 25 --configs default streaming --resume", "make stops"),
        ("--budget 3 --stops parent", "make stops BUDGET=3 'STOPS=--stops parent'"),
        (
            "--at-once 1 --situations idle running --configs streaming",
            "make stops 'STOPS=--at-once 1 --situations idle running --configs streaming'",
        ),
    ],
)
def test_a_result_records_the_options_that_the_run_had(arguments: str, recorded: str) -> None:
    parser = matrix_parser()
    assert command(parser, parser.parse_args(arguments.split())) == recorded

"""The generator's process: a plan in JSON on stdin, records in JSON on stdout. Started by `load.driver` only."""

from __future__ import annotations

# First of all: it makes the standard library's sockets cooperative.
import locust  # noqa: F401  isort: skip

import json
import sys

from perf.load.generator import generate
from perf.load.plan import Plan


def main() -> None:
    """Read the plan, run it, write the records."""
    records = generate(Plan.from_json(sys.stdin.read()))
    json.dump([record.to_json() for record in records], sys.stdout)


main()

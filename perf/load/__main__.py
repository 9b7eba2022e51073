"""The generator's process: a plan as JSON on stdin, records as JSON on stdout. Started by `load.driver`."""

from __future__ import annotations

import asyncio
import json
import sys

from perf.load.driver import Plan
from perf.load.generator import generate


def main() -> None:
    """Read the plan, run it, write the records."""
    records = asyncio.run(generate(Plan.from_json(sys.stdin.read())))
    json.dump([record.to_json() for record in records], sys.stdout)


main()

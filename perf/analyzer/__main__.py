"""Fetch perf_analyzer beforehand: `python -m perf.analyzer --prefetch`."""

from __future__ import annotations

import argparse
import sys

from triton_local.errors import LauncherError

from perf.analyzer.binary import VERSION, AnalyzerError, fetched

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m perf.analyzer", description=__doc__)
    parser.add_argument("--prefetch", action="store_true", required=True, help="fetch it if missing and print its path")
    parser.parse_args()
    try:
        print(f"perf_analyzer {VERSION}: {fetched()}")
    except (AnalyzerError, LauncherError) as error:
        sys.exit(f"perf_analyzer: {error}")

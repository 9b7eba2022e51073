"""Fetch perf_analyzer beforehand: `python -m perf.analyzer --prefetch`."""

from __future__ import annotations

import argparse
import sys

from triton_local.errors import LauncherError

from perf.analyzer.binary import AnalyzerError, find

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m perf.analyzer", description=__doc__)
    parser.add_argument("--prefetch", action="store_true", required=True)
    parser.parse_args()
    try:
        found = find()
    except (AnalyzerError, LauncherError) as error:
        sys.exit(f"perf_analyzer: {error}")
    print(f"perf_analyzer {found.version}: {found.executable}")

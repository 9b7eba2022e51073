"""Get perf_analyzer ready: `python -m perf.analyzer --prefetch`, so that no benchmark has to."""

from __future__ import annotations

import argparse
import sys

from triton_local.errors import LauncherError

from perf.analyzer.binary import find
from perf.analyzer.errors import AnalyzerError


def main() -> None:
    """Find or fetch it, and say where it is; one line and exit code 1 if that can't be."""
    parser = argparse.ArgumentParser(prog="python -m perf.analyzer", description=__doc__)
    parser.add_argument("--prefetch", action="store_true", required=True)
    parser.parse_args()
    try:
        found = find()
    except (AnalyzerError, LauncherError) as error:
        sys.exit(f"perf_analyzer: {error}")
    print(f"perf_analyzer {found.version}: {found.executable}")


if __name__ == "__main__":
    main()

"""Run the report from the command line."""

import sys

from perf.report.cli import main

if __name__ == "__main__":
    sys.exit(main())

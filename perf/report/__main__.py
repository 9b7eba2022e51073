"""Run the report from the command line."""

import sys

from perf.report.documents import main

if __name__ == "__main__":
    sys.exit(main())

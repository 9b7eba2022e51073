"""The report runs on a machine without torch."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_report_imports_neither_torch_nor_transformers() -> None:
    program = (
        "import sys, perf.report.documents, perf.report.plots; "
        "print(sorted({'torch', 'transformers', 'triton'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"

"""Train models/pydoc-llama: `python -m models.train_pydoc_llama --out models/pydoc-llama`, from the repository's root.

Stops cleanly on SIGTERM and on Ctrl-C, and continues where it was when it is started again.
"""

import argparse
from pathlib import Path

import torch

from models.train_pydoc_llama.plan import Plan
from models.train_pydoc_llama.run import Run


def main() -> None:
    """Read the options and train."""
    parser = argparse.ArgumentParser(prog="python -m models.train_pydoc_llama", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the checkpoint's folder")
    parser.add_argument("--work", type=Path, default=Path(".work/pydoc-llama"), help="where an unfinished run is kept")
    parser.add_argument("--steps", type=int, default=Plan.steps, help=f"optimizer steps (default {Plan.steps})")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the trainer has threads of its own
    Run.prepare(options.out, options.work, Plan(steps=options.steps)).train()


if __name__ == "__main__":
    main()

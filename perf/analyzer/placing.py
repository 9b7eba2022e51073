"""A folder in a cache, whole or not at all, whoever else makes it at the same time."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from perf.analyzer.errors import MissingAnalyzerError


def placed(target: Path, names: Sequence[str], build: Callable[[Path], None]) -> Path:
    """Return `target` with all these files in it; unless it is there already, `build` fills a folder that becomes it.

    Raises MissingAnalyzerError when the cache can't be written, or when `target` is there without one of the files.
    """
    if _complete(target, names):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Under another name first: an interrupted one must not be taken for a whole one.
        building = Path(tempfile.mkdtemp(prefix=".building-", dir=target.parent))
    except OSError as error:
        raise MissingAnalyzerError(
            f"{target} can't be written ({error}): set TRITON_LLAMA_CACHE to a folder that can be written"
        ) from error
    try:
        build(building)
        try:
            os.rename(building, target)  # noqa: PTH104 - Path.rename says nothing about folders
        except OSError as error:
            if not _complete(target, names):
                raise MissingAnalyzerError(f"{target} is damaged ({error}): delete it") from error
            # Another process was quicker, and has made the same.
        return target
    except OSError as error:
        raise MissingAnalyzerError(f"{target} can't be made: {error}") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _complete(target: Path, names: Sequence[str]) -> bool:
    return all((target / name).exists() for name in names)

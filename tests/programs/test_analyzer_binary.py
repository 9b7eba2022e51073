"""Where perf_analyzer comes from, and the error when there is none. With pip, without an index."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from perf.analyzer.binary import LIBRARIES, PLATFORM, VERSION, AnalyzerError, fetched, library_path
from perf.analyzer.run import measure
from perf.load.protocols import Request

NOT_STABLE = "#!/bin/sh\necho 'Failed to obtain stable measurement.' >&2\n"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The launcher's cache, which does not exist yet. Pip has an empty folder, wheels, as its only source."""
    (tmp_path / "wheels").mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("TRITON_LLAMA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_binary_finds_the_libraries_of_the_wheel_before_those_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/somewhere")
    with library_path() as given:
        folder, rest = given["LD_LIBRARY_PATH"].split(":")
        assert rest == "/somewhere"
        assert sorted(path.name for path in Path(folder).iterdir()) == sorted(LIBRARIES)
        assert all((Path(folder) / name).read_bytes()[:4] == b"\x7fELF" for name in LIBRARIES)
    monkeypatch.delenv("LD_LIBRARY_PATH")
    with library_path() as given:
        assert ":" not in given["LD_LIBRARY_PATH"], "an empty entry would be the working directory"


def test_without_an_index_the_error_names_the_package(cache: Path) -> None:
    with pytest.raises(
        AnalyzerError, match=r"pip can't get tritonclient==2\.51\.0 .*with a package index within reach"
    ):
        fetched()
    assert list(cache.iterdir()) == [], "nothing incomplete stays in the cache"


def test_a_wheel_of_other_bytes_is_refused(cache: Path) -> None:
    other = cache.parent / "wheels" / f"tritonclient-{VERSION}-py3-none-{PLATFORM}.whl"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr(f"tritonclient-{VERSION}.data/data/bin/perf_analyzer", NOT_STABLE)
        information = f"tritonclient-{VERSION}.dist-info"
        archive.writestr(f"{information}/METADATA", f"Metadata-Version: 2.1\nName: tritonclient\nVersion: {VERSION}\n")
        archive.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{information}/RECORD", "")
    with pytest.raises(AnalyzerError, match="DO NOT MATCH THE HASHES"):
        fetched()
    assert list(cache.iterdir()) == []


def test_a_cache_that_can_not_be_written_is_named(cache: Path) -> None:
    cache.write_text("a file, where the folder should be")
    with pytest.raises(AnalyzerError, match="set TRITON_LLAMA_CACHE to a folder that can be written"):
        fetched()


def test_a_run_without_an_export_is_an_error_despite_exit_code_0(cache: Path) -> None:
    binary = cache / f"perf_analyzer-{VERSION}" / "perf_analyzer"
    binary.parent.mkdir(parents=True)
    binary.write_text(NOT_STABLE)
    binary.chmod(0o755)
    with pytest.raises(AnalyzerError, match=r"code 0: Failed to obtain stable measurement\."):
        measure("127.0.0.1:1", [Request("a", 1)] * 4, 1, 1, 10.0)

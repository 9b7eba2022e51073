"""Which perf_analyzer is used, and the error when there is none. With pip, without an index."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from perf.analyzer.binary import LIBRARIES, PLATFORM, VERSION, MissingAnalyzerError, fetched, find
from perf.analyzer.run import FailedRunError, measure
from perf.load.protocols import Request

RUNS = "#!/bin/sh\necho 'Perf Analyzer Version 9.8.7 (commit unknown)'\n"
LACKS_LIBRARIES = "#!/bin/sh\necho 'perf_analyzer: error while loading shared libraries: libb64' >&2\nexit 127\n"
NOT_STABLE = RUNS + "test \"$1\" = --version || echo 'Failed to obtain stable measurement.' >&2\n"


def script(folder: Path, content: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "perf_analyzer"
    path.write_text(content)
    path.chmod(0o755)
    return path


@pytest.fixture
def no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Leave pip an empty folder as its only source; return that."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def environment(folder: Path) -> dict[str, str]:
    return {"PATH": str(folder / "bin"), "TRITON_LLAMA_CACHE": str(folder / "cache")}


def test_one_on_path_that_runs_is_used(tmp_path: Path) -> None:
    mine = script(tmp_path / "bin", RUNS)
    found = find(environment(tmp_path))
    assert (found.executable, found.libraries, found.version) == (mine, {}, "9.8.7")
    assert not (tmp_path / "cache").exists()


def test_one_on_path_that_does_not_run_is_reported_and_the_cached_one_is_used_with_its_libraries(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path / "bin", LACKS_LIBRARIES)
    cached = script(tmp_path / "cache" / f"perf_analyzer-{VERSION}", RUNS)
    found = find(environment(tmp_path))
    assert found.executable == cached
    assert "bin/perf_analyzer doesn't run here (exit code 127)" in capsys.readouterr().err
    monkeypatch.setenv("LD_LIBRARY_PATH", "/somewhere")
    with found.environment() as given:
        folder, rest = given["LD_LIBRARY_PATH"].split(":")
        assert rest == "/somewhere"
        assert sorted(path.name for path in Path(folder).iterdir()) == sorted(LIBRARIES)
        assert all((Path(folder) / name).read_bytes()[:4] == b"\x7fELF" for name in LIBRARIES)
    monkeypatch.delenv("LD_LIBRARY_PATH")
    with found.environment() as given:
        assert ":" not in given["LD_LIBRARY_PATH"], "an empty entry would be the working directory"


def test_without_an_index_the_error_names_the_package_and_the_remedy(tmp_path: Path, no_index: Path) -> None:
    with pytest.raises(
        MissingAnalyzerError, match=r"pip can't get tritonclient==2\.51\.0 .*put a perf_analyzer on PATH"
    ):
        find(environment(tmp_path))
    assert list((tmp_path / "cache").iterdir()) == [], "nothing incomplete stays in the cache"


def test_a_wheel_of_other_bytes_is_refused(tmp_path: Path, no_index: Path) -> None:
    other = no_index / f"tritonclient-{VERSION}-py3-none-{PLATFORM}.whl"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr(f"tritonclient-{VERSION}.data/data/bin/perf_analyzer", RUNS)
        information = f"tritonclient-{VERSION}.dist-info"
        archive.writestr(f"{information}/METADATA", f"Metadata-Version: 2.1\nName: tritonclient\nVersion: {VERSION}\n")
        archive.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{information}/RECORD", "")
    with pytest.raises(MissingAnalyzerError, match="DO NOT MATCH THE HASHES"):
        fetched(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, where the folder should be")
    with pytest.raises(MissingAnalyzerError, match="set TRITON_LLAMA_CACHE to a folder that can be written"):
        fetched(tmp_path / "cache")


def test_a_run_without_an_export_is_an_error_despite_exit_code_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path / "bin", NOT_STABLE)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    with pytest.raises(FailedRunError, match=r"code 0: Failed to obtain stable measurement\."):
        measure("127.0.0.1:1", [Request("a", 1)] * 4, 1, 1, 10.0)

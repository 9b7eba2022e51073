"""The Python backend's folder in /tmp, which a killed server leaves, and which has no mark of its owner."""

import time
from pathlib import Path

import pytest
from triton_local import guard


@pytest.mark.parametrize(
    ("starting_beside", "another_runs", "left"),
    [((), True, {"before", "after_"}), (("beside",), False, {"before"}), (("beside",), True, None)],
)
def test_a_servers_folder_is_removed_unless_another_triton_may_need_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    starting_beside: tuple[str, ...],
    another_runs: bool,
    left: set[str] | None,
) -> None:
    def make(name: str) -> None:
        # Later than the times before it, which the kernel's clock of files is a little behind.
        time.sleep(0.05)
        (tmp_path / f"python_env_{name}").mkdir()

    monkeypatch.setattr(guard, "ENVIRONMENT_FOLDERS", tmp_path)
    monkeypatch.setattr(guard, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(guard, "_a_python_backend_runs", lambda: another_runs)
    make("before")
    time.sleep(0.05)
    folder = guard.EnvironmentFolder("region_")
    for name in ("of_our", *starting_beside):
        make(name)
    (tmp_path / "region_1").touch()
    folder.look()
    if another_runs:
        make("after_")
    folder.remove()
    there = {path.name.removeprefix("python_env_") for path in tmp_path.glob("python_env_*")}
    assert there == (left or {"before", "of_our", "beside", "after_"})

"""What the nvidia-pytriton wheel brings: tritonserver, the Python backend, its stubs, the caches, their libraries.

Only files are looked at; pytriton's own Python API is neither needed nor imported.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from triton_local.errors import MissingWheelError, UnsupportedInterpreterError

DISTRIBUTION = "nvidia-pytriton"
STUB_NAME = "triton_python_backend_stub"


@dataclass(frozen=True)
class TritonWheel:
    """An installed nvidia-pytriton: `root` is its `tritonserver` folder, `libraries` its folder of shared libraries."""

    version: str
    root: Path
    libraries: Path

    @property
    def tritonserver(self) -> Path:
        """The server binary."""
        return self.root / "bin" / "tritonserver"

    @property
    def python_backend(self) -> Path:
        """The folder of the Python backend, which lacks a stub."""
        return self.root / "backends" / "python"

    @property
    def caches(self) -> Path:
        """The folder of response cache implementations."""
        return self.root / "caches"

    def supported_versions(self) -> tuple[str, ...]:
        """Python versions that have a stub, ascending: ("3.8", "3.9", "3.10", ...)."""
        found = [stub.parent.name for stub in (self.root / "python_backend_stubs").glob(f"*/{STUB_NAME}")]
        return tuple(sorted(found, key=lambda version: [int(part) for part in version.split(".")]))

    def stub(self, minor_version: str) -> Path:
        """The backend's stub for Python `minor_version` ("3.11").

        Raises UnsupportedInterpreterError with the list of the versions that have one.
        """
        supported = self.supported_versions()
        if minor_version not in supported:
            raise UnsupportedInterpreterError(
                f"Python {minor_version} has no Python backend stub in {DISTRIBUTION} {self.version}: "
                f"use one of {', '.join(supported)}"
            )
        return self.root / "python_backend_stubs" / minor_version / STUB_NAME


def find_wheel(search_path: Sequence[Path]) -> TritonWheel:
    """The nvidia-pytriton installed in one of the folders of `search_path` (site-packages folders).

    Raises MissingWheelError when there is none, or when a part of it is missing.
    """
    installed = next(iter(metadata.distributions(name=DISTRIBUTION, path=[str(path) for path in search_path])), None)
    if installed is None:
        looked = ", ".join(str(path) for path in search_path)
        raise MissingWheelError(
            f"the package {DISTRIBUTION}, which brings tritonserver, isn't installed in {looked}: "
            f"pip install {DISTRIBUTION}"
        )
    wheel = TritonWheel(
        version=installed.version,
        root=Path(str(installed.locate_file("pytriton/tritonserver"))),
        libraries=Path(str(installed.locate_file("nvidia_pytriton.libs"))),
    )
    for part in (wheel.tritonserver, wheel.python_backend, wheel.caches, wheel.libraries):
        if not part.exists():
            raise MissingWheelError(
                f"{DISTRIBUTION} {wheel.version} is installed without {part}: "
                f"pip install --force-reinstall --no-deps {DISTRIBUTION}"
            )
    return wheel

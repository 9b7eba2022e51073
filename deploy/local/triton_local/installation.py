"""The Python and the nvidia-pytriton wheel that tritonserver runs with.

The backend's stub embeds Python: it links `libpython<major.minor>.so.1.0` and finds its standard library beside the
first `python3` on PATH. The wheel contributes tritonserver, the Python backend, its stubs, the caches and their
libraries; its own Python API isn't imported.
"""

import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from triton_local.errors import MissingLibpythonError, MissingWheelError, UnsupportedInterpreterError


@dataclass(frozen=True)
class Interpreter:
    """One interpreter. executable: not resolved, because a virtual environment's `python` is a link out of it.

    library_dirs: where its own libpython may be; another build of the same version on the machine doesn't do.
    """

    executable: Path
    version: tuple[int, int, int]
    library_dirs: tuple[Path, ...]
    site_packages: tuple[Path, ...]

    @classmethod
    def current(cls) -> "Interpreter":
        """Return the running interpreter."""
        paths = sysconfig.get_paths()
        # LIBDIR is what the build was configured with; a relocated build has its library under base_prefix instead.
        configured = sysconfig.get_config_var("LIBDIR")
        multiarch = sysconfig.get_config_var("MULTIARCH")
        directories = [Path(configured)] if configured else []
        directories.append(Path(sys.base_prefix) / "lib")
        if multiarch:
            directories += [directory / multiarch for directory in list(directories)]
        return cls(
            executable=Path(sys.executable),
            version=(sys.version_info.major, sys.version_info.minor, sys.version_info.micro),
            library_dirs=tuple(dict.fromkeys(directories)),
            site_packages=tuple(dict.fromkeys((Path(paths["purelib"]), Path(paths["platlib"])))),
        )

    @property
    def minor_version(self) -> str:
        """Such as "3.11"."""
        return f"{self.version[0]}.{self.version[1]}"

    @property
    def full_version(self) -> str:
        """Such as "3.11.7"."""
        return ".".join(str(part) for part in self.version)

    def libpython(self) -> Path:
        """Return the interpreter's own shared library. Raises MissingLibpythonError, with the package that has it."""
        name = f"libpython{self.minor_version}.so.1.0"
        for directory in self.library_dirs:
            if (directory / name).is_file():
                return directory / name
        looked = ", ".join(str(directory) for directory in self.library_dirs)
        raise MissingLibpythonError(
            f"{self.executable} (Python {self.full_version}) has no shared {name} in {looked}: "
            f"install the package libpython{self.minor_version} (apt-get install libpython{self.minor_version}), "
            f"or, for a Python built from source, build it with --enable-shared"
        )


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
        """The folder of the Python backend, without a stub."""
        return self.root / "backends" / "python"

    @property
    def caches(self) -> Path:
        """The folder of response cache implementations."""
        return self.root / "caches"

    def supported_versions(self) -> tuple[str, ...]:
        """Return the Python versions that have a stub, ascending: ("3.8", "3.9", "3.10", ...)."""
        found = [stub.parent.name for stub in (self.root / "python_backend_stubs").glob(f"*/{STUB_NAME}")]
        return tuple(sorted(found, key=lambda version: [int(part) for part in version.split(".")]))

    def stub(self, minor_version: str) -> Path:
        """Return the backend's stub for Python `minor_version` ("3.11"). Raises UnsupportedInterpreterError."""
        supported = self.supported_versions()
        if minor_version not in supported:
            raise UnsupportedInterpreterError(
                f"Python {minor_version} has no Python backend stub in {DISTRIBUTION} {self.version}: "
                f"use one of {', '.join(supported)}"
            )
        return self.root / "python_backend_stubs" / minor_version / STUB_NAME


def find_wheel(search_path: Sequence[Path]) -> TritonWheel:
    """Return the nvidia-pytriton of the first site-packages folder that has it.

    Raises MissingWheelError when there is none, or a part of it is missing.
    """
    installed = next(iter(metadata.distributions(name=DISTRIBUTION, path=[str(path) for path in search_path])), None)
    if installed is None:
        looked = ", ".join(str(path) for path in search_path)
        raise MissingWheelError(
            f"the package {DISTRIBUTION}, which contains tritonserver, isn't installed in {looked}: "
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

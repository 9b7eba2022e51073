"""What tritonserver runs from: the nvidia-pytriton wheel, this Python, and a folder of links that joins them.

The backend's stub embeds Python: it links `libpython<major.minor>.so.1.0` and finds its standard library beside the
first `python3` on PATH. The wheel contributes tritonserver, the Python backend, its stubs, the caches and their
libraries; its own Python API isn't imported.
"""

import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from triton_local.errors import MissingPartError


@dataclass(frozen=True)
class Interpreter:
    """A Python whose libraries the model imports.

    executable: not resolved, because a virtual environment's `python` is a link out of it. minor_version: "3.11".
    library_dirs: where its own libpython may be; another build of the same version on the machine doesn't do.
    """

    executable: Path
    minor_version: str
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
            minor_version=f"{sys.version_info.major}.{sys.version_info.minor}",
            library_dirs=tuple(dict.fromkeys(directories)),
            site_packages=tuple(dict.fromkeys((Path(paths["purelib"]), Path(paths["platlib"])))),
        )

    def libpython(self) -> Path:
        """Return the interpreter's own shared library. Raises MissingPartError, with the package that has it."""
        name = f"libpython{self.minor_version}.so.1.0"
        for directory in self.library_dirs:
            if (directory / name).is_file():
                return directory / name
        looked = ", ".join(str(directory) for directory in self.library_dirs)
        raise MissingPartError(
            f"{self.executable} (Python {self.minor_version}) has no shared {name} in {looked}: "
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
    def python_backend(self) -> Path:
        """The folder of the Python backend, without a stub."""
        return self.root / "backends" / "python"

    @property
    def caches(self) -> Path:
        """The folder of response cache implementations."""
        return self.root / "caches"

    def stub(self, minor_version: str) -> Path:
        """Return the backend's stub for Python `minor_version` ("3.11"). Raises MissingPartError."""
        stubs = self.root / "python_backend_stubs"
        if not (stubs / minor_version / STUB_NAME).is_file():
            versions = sorted(path.parent.name for path in stubs.glob(f"*/{STUB_NAME}"))
            raise MissingPartError(
                f"Python {minor_version} has no Python backend stub in {DISTRIBUTION} {self.version}: "
                f"it has {', '.join(versions)}"
            )
        return stubs / minor_version / STUB_NAME


def find_wheel(search_path: Sequence[Path]) -> TritonWheel:
    """Return the nvidia-pytriton of the first site-packages folder that has it.

    Raises MissingPartError when there is none, or a part of it is missing.
    """
    installed = next(iter(metadata.distributions(name=DISTRIBUTION, path=[str(path) for path in search_path])), None)
    if installed is None:
        looked = ", ".join(str(path) for path in search_path)
        raise MissingPartError(
            f"the package {DISTRIBUTION}, which contains tritonserver, isn't installed in {looked}: "
            f"pip install {DISTRIBUTION}"
        )
    wheel = TritonWheel(
        version=installed.version,
        root=Path(str(installed.locate_file("pytriton/tritonserver"))),
        libraries=Path(str(installed.locate_file("nvidia_pytriton.libs"))),
    )
    for part in (wheel.root / "bin" / "tritonserver", wheel.python_backend, wheel.caches, wheel.libraries):
        if not part.exists():
            raise MissingPartError(
                f"{DISTRIBUTION} {wheel.version} is installed without {part}: "
                f"pip install --force-reinstall --no-deps {DISTRIBUTION}"
            )
    return wheel


def refuse_numpy_2(interpreter: Interpreter, wheel: TritonWheel) -> None:
    """Raise MissingPartError if the environment has NumPy 2 or newer: the wheel's stub crashes at the first request."""
    path = [str(folder) for folder in interpreter.site_packages]
    installed = next(iter(metadata.distributions(name="numpy", path=path)), None)
    if installed is not None and int(installed.version.partition(".")[0]) >= 2:
        raise MissingPartError(
            f"numpy {installed.version} is installed for {interpreter.executable}, and the Python backend stub of "
            f"{DISTRIBUTION} {wheel.version} crashes with numpy 2 or newer: "
            f"{interpreter.executable} -m pip install 'numpy<2'"
        )


def link_runtime(folder: Path, wheel: TritonWheel, interpreter: Interpreter) -> None:
    """Link what tritonserver needs into an empty folder. Raises MissingPartError.

    backends/python/   the wheel's Python backend with the stub of this Python beside it
    lib/               libpython only: other files of its folder must not hide the system's libraries
    """
    libpython, stub = interpreter.libpython(), wheel.stub(interpreter.minor_version)
    backend, libraries = folder / "backends" / "python", folder / "lib"
    for links, targets in (
        (backend, [*(part for part in wheel.python_backend.iterdir() if part.is_file()), stub]),
        (libraries, [libpython]),
    ):
        links.mkdir(parents=True)
        for target in targets:
            (links / target.name).symlink_to(target)


def runtime_environment(
    folder: Path, wheel: TritonWheel, interpreter: Interpreter, inherited: Mapping[str, str]
) -> dict[str, str]:
    """Return `inherited` with the paths that tritonserver, in a `link_runtime` folder, and its stub need."""
    return {
        **inherited,
        # The stub uses the prefix of the first python3 on PATH.
        "PATH": _joined(interpreter.executable.parent, wheel.root / "bin", inherited.get("PATH", "")),
        "LD_LIBRARY_PATH": _joined(folder / "lib", wheel.libraries, inherited.get("LD_LIBRARY_PATH", "")),
        "PYTHONPATH": _joined(*interpreter.site_packages, inherited.get("PYTHONPATH", "")),
        # The model's prints reach the log at once.
        "PYTHONUNBUFFERED": "1",
    }


def _joined(*entries: Path | str) -> str:
    # An empty entry would be the working directory.
    return ":".join(str(entry) for entry in entries if str(entry))

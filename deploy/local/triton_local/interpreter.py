"""The Python that the model will run in: its version, its shared library, where its packages are.

The backend's stub embeds Python: it links `libpython<major.minor>.so.1.0` and looks for its standard library beside the
`python3` it finds first on PATH. Knows nothing about Triton's wheel.
"""

import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from triton_local.errors import MissingLibpythonError


@dataclass(frozen=True)
class Interpreter:
    """Facts about one interpreter; `current()` reads them off the running one.

    `executable` stays unresolved (a virtual environment's `python` is a link out of it). `library_dirs` are where its
    own libpython may lie: another build of the same version elsewhere on the machine isn't good enough.
    """

    executable: Path
    version: tuple[int, int, int]
    library_dirs: tuple[Path, ...]
    site_packages: tuple[Path, ...]

    @classmethod
    def current(cls) -> "Interpreter":
        """The interpreter this runs in."""
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
        """For instance "3.11"."""
        return f"{self.version[0]}.{self.version[1]}"

    @property
    def full_version(self) -> str:
        """For instance "3.11.7"."""
        return ".".join(str(part) for part in self.version)

    def libpython(self) -> Path:
        """The interpreter's own shared library.

        Raises MissingLibpythonError, naming the package that brings it.
        """
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

"""Pack what a run needs on a machine with PyTorch and CUDA but without a package index: `python -m perf.gpu.pack`.

    .work/gpu/site.tar.gz     packages that the engine needs and such a machine lacks or has in another version; of
                              bitsandbytes one CUDA library instead of all
    .work/gpu/sources.json    the commit that was copied, for the results
    .work/gpu/numpy.tar.xz    only with --triton: NumPy for the other machine's Python, in Triton's backend's version
    .work/gpu-triton/triton.tar.xz    only with --triton: the server and perf_analyzer, in a folder of its own because
                              it is as large as the rest together and may have to travel alone

`perf/gpu/elsewhere.sh` unpacks them. Only packages for every Python can be taken from this environment; NumPy is
downloaded for the other one. PyTorch is not packed: it has gigabytes and must match the driver.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from importlib.metadata import distribution
from pathlib import Path

from perf.environment import ROOT, sources

FOLDER = ROOT / ".work" / "gpu"
TRITON = ROOT / ".work" / "gpu-triton"
PACKAGES = ("transformers", "bitsandbytes", "accelerate", "pytest-asyncio")
NUMPY = "numpy==1.26.4"
"""The Python backend of nvidia-pytriton 0.7 was built against NumPy 1."""

_GPU_LIBRARIES = ("libbitsandbytes_cuda", "libbitsandbytes_rocm", "libbitsandbytes_xpu")


def main() -> None:
    """Pack, and print the sizes."""
    parser = argparse.ArgumentParser(prog="python -m perf.gpu.pack", description=__doc__)
    parser.add_argument("--cuda", default="130", help="of PyTorch there, without the point (default 130)")
    parser.add_argument("--python", default="3.12", help="there (default 3.12); only for --triton")
    parser.add_argument("--triton", action="store_true", help="tritonserver and perf_analyzer, too")
    options = parser.parse_args()
    for folder in (FOLDER, TRITON):
        folder.mkdir(parents=True, exist_ok=True)
        # Archives of another commit must not travel with this one.
        for old in [*folder.glob("*.tar.*"), *folder.glob("sources.json")]:
            old.unlink()
    (FOLDER / "sources.json").write_text(json.dumps(sources(), indent=1) + "\n")
    pack_site(FOLDER / "site.tar.gz", PACKAGES, options.cuda)
    if options.triton:
        pack_numpy(FOLDER / "numpy.tar.xz", options.python)
        pack_triton(TRITON / "triton.tar.xz", options.python)
    for file in sorted([*FOLDER.iterdir(), *TRITON.iterdir()]):
        print(f"{file.stat().st_size / 2**20:7.1f} MiB  {file.relative_to(ROOT)}")


def pack_site(archive: Path, packages: Sequence[str], cuda: str) -> None:
    """Pack packages of this environment's site-packages; bitsandbytes for one version of CUDA."""
    with tarfile.open(archive, "w:gz") as tar:
        for package in packages:
            for name, file in files_of(package):
                if not file.name.startswith(_GPU_LIBRARIES) or file.name == f"libbitsandbytes_cuda{cuda}.so":
                    tar.add(file, name, filter=_plain)


def files_of(package: str) -> Iterator[tuple[str, Path]]:
    """Yield a package's files by name under site-packages, without bytecode.

    Raises ValueError for a package that was built for one version of Python.
    """
    found = distribution(package)
    wheel = found.read_text("WHEEL") or ""
    if "Tag: py3-none-" not in wheel and "Tag: py2.py3-none-" not in wheel:
        raise ValueError(f"{package} {found.version} was built for this Python; it can't be taken to another one")
    for file in found.files or []:
        # Scripts of bin/ contain this environment's paths.
        if file.parts[0] != ".." and "__pycache__" not in file.parts:
            yield file.as_posix(), Path(str(file.locate()))


def pack_triton(archive: Path, python: str) -> None:
    """Pack nvidia-pytriton's server with the stub for one Python, and perf_analyzer from the benchmarks' cache."""
    # Imported here: only this needs the launcher.
    from perf.analyzer.binary import fetched

    analyzer = fetched()
    with tarfile.open(archive, "w:xz") as tar:
        for name, file in files_of("nvidia-pytriton"):
            if is_of_the_server(name, python):
                tar.add(file, name, filter=_plain)
        tar.add(analyzer, f"cache/{analyzer.parent.name}/{analyzer.name}", filter=_plain)


def pack_numpy(archive: Path, python: str) -> None:
    """Download NumPy for one Python and pack its wheel's content, without its tests: wheels hardly compress."""
    platforms = [f"--platform=manylinux{name}_x86_64" for name in ("_2_28", "_2_17", "2014")]
    with tempfile.TemporaryDirectory() as name, tarfile.open(archive, "w:xz") as tar:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        what = ["--only-binary=:all:", f"--python-version={python}", *platforms, f"--dest={name}", NUMPY]
        subprocess.run([*command, *what], check=True)
        with zipfile.ZipFile(next(Path(name).glob("*.whl"))) as wheel:
            for inside in wheel.namelist():
                if "tests" not in Path(inside).parts and not inside.endswith("/"):
                    tar.add(wheel.extract(inside, name), inside, filter=_plain)


def is_of_the_server(name: str, python: str) -> bool:
    """Return whether a server with one version of Python needs that file of nvidia-pytriton."""
    if name.startswith("pytriton/tritonserver/python_backend_stubs/"):
        return f"/{python}/" in name
    # A whole libpython, for the stub of another version.
    if name.startswith("nvidia_pytriton.libs/libpython"):
        return False
    return name.startswith(("pytriton/tritonserver/", "nvidia_pytriton.libs/")) or ".dist-info/" in name


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


if __name__ == "__main__":
    main()

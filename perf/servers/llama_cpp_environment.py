"""llama.cpp's server, `.work/llama.cpp`; `python -m perf.servers.llama_cpp_environment` compiles it for this CPU.

The source is what the package llama-cpp-python carries. That package's own server in Python answers one request at a
time; llama.cpp's has slots. It takes a C++ compiler, cmake and ten minutes of two cores.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from perf.command import CORES
from perf.environment import ROOT
from perf.servers.running import NotRunError

FOLDER = ROOT / ".work" / "llama.cpp"
PACKAGE, VERSION = "llama-cpp-python", "0.3.36"
_SERVER = FOLDER / "build" / "bin" / "llama-server"
_OFF = ("LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_APP", "LLAMA_BUILD_UI", "LLAMA_USE_PREBUILT_UI")


def program() -> Path:
    """Return the path of llama-server. Raises NotRunError if it does not exist."""
    if not _SERVER.exists():
        raise NotRunError("llama.cpp isn't built: make bench-llama-cpp does it, in .work/llama.cpp")
    return _SERVER


def create() -> None:
    """Build it anew. Raises subprocess.CalledProcessError where a step fails; its output goes to the terminal."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER.parent) as folder:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--no-binary", PACKAGE, "--dest", folder, f"{PACKAGE}=={VERSION}"], check=True)
        (archive,) = Path(folder).glob("*.tar.gz")
        with tarfile.open(archive) as source:
            source.extractall(folder, filter="data")
        (llama_cpp,) = Path(folder).glob("*/vendor/llama.cpp")
        llama_cpp.rename(FOLDER)
    build = ["cmake", "-S", str(FOLDER), "-B", str(FOLDER / "build"), "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON"]
    subprocess.run([*build, "-DLLAMA_OPENSSL=OFF", *(f"-D{option}=OFF" for option in _OFF)], check=True)
    targets = ["--target", "llama-server", "--parallel", str(CORES)]
    subprocess.run(["cmake", "--build", str(FOLDER / "build"), *targets], check=True)


if __name__ == "__main__":
    argparse.ArgumentParser(prog="make bench-llama-cpp", description=__doc__).parse_args()
    create()
    print(program().relative_to(ROOT))

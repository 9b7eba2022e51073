"""One run: nothing to do, or fetch, quantize, save, verify and rename into place.

OUT            the finished checkpoint, complete or absent
OUT.part       the one in progress; the next run deletes what a killed run leaves
OUT.replaced   the previous one, while `force` replaces it
OUT.lock       held by the run in progress
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock, Timeout
from llama_engine.errors import CheckpointError
from llama_engine.model.manifest import MANIFEST, Manifest, PreparedFile, Source, sha256_of

from triton_prepare.progress import PrepareError, say, stage
from triton_prepare.source import choose_files, fetch, find_source, is_quantized, is_same, saved_threshold


def prepare(model: str, revision: str | None, out: Path, device: str = "auto", force: bool = False) -> Manifest:
    """Prepare a checkpoint unless it is prepared already; return its manifest. The arguments are the command line's.

    Raises PrepareError, EngineError where the server would refuse to load the source, or OSError for a file of it.
    """
    request = find_source(model, revision)
    out = out.expanduser().resolve()  # Without links: the rename must stay on one volume.
    if (done := _finished(out, request, force)) is not None:  # Without the lock: the volume may be read-only.
        return done
    with _locked(out):
        return _finished(out, request, force) or _make(model, request, out, device)


def _finished(out: Path, request: Source, force: bool) -> Manifest | None:
    """Return the manifest of an existing result if it is intact and from this source; None if there is no result."""
    manifest = Manifest.read(out)
    if manifest is None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise PrepareError(f"{out} is there and was not prepared by this program: name another folder")
    if manifest is None or force:
        return None
    if not is_same(request, manifest.source):
        sources = f"{out} was prepared from {manifest.source.describe()}, not from {request.describe()}"
        raise PrepareError(f"{sources}: name another folder, or have it replaced with --force")
    try:
        manifest.check_sizes(out)
        with stage("checking the files", manifest.bytes) as add:
            manifest.check_hashes(out, add)
    except CheckpointError as error:
        raise PrepareError(f"{error}; --force prepares it anew") from error
    say(f"nothing to do: {out} is the {manifest.describe()}")
    return manifest


def _make(model: str, request: Source, out: Path, device: str) -> Manifest:
    folder, source = fetch(model, request)
    loaded, copied = choose_files(model, folder)
    from triton_prepare.quantize import copy, quantize, saved_dtype  # Here, as importing PyTorch takes seconds.

    quantized = is_quantized(model, folder)
    dtype = "checkpoint" if quantized else saved_dtype(model, folder)
    part, replaced = Path(f"{out}.part"), Path(f"{out}.replaced")
    with _writing(out):
        for leftover in filter(Path.exists, (part, replaced)):  # Of a killed run.
            shutil.rmtree(leftover)
        part.mkdir()
    if quantized:
        used = copy(folder, [*loaded, *copied], part, device)
    else:
        used = quantize(folder, copied, dtype, part, device)
    sizes = {path.name: path.stat().st_size for path in sorted(part.iterdir())}
    with stage("hashing", sum(sizes.values())) as add:
        files = {name: PreparedFile(count, sha256_of(part / name, add)) for name, count in sizes.items()}
    quantization = "checkpoint" if quantized else "int8"
    settings = dict[str, str | float](quantization=quantization, dtype=dtype, device=used.type)
    # The server's default threshold: the weights don't depend on it, and they can be served at any other.
    threshold = saved_threshold(model, folder) if quantized else 0.0
    if threshold is not None:
        settings["int8_threshold"] = threshold
    versions = {name: version(name) for name in ("torch", "transformers", "bitsandbytes", "safetensors")}
    manifest = Manifest(source, settings, versions, datetime.now(UTC).isoformat(timespec="seconds"), files)
    with _writing(out):
        (part / MANIFEST).write_text(manifest.to_json())
        for path in part.iterdir():  # safetensors creates files that only their owner, maybe not the server, can read.
            path.chmod((part / MANIFEST).stat().st_mode)
            _flush(path)
        _flush(part)
        if out.exists():
            out.rename(replaced)
        part.rename(out)
        _flush(out.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    say(f"{out}: {manifest.bytes / 1e9:.2f} GB, {manifest.describe()}")
    return manifest


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Hold OUT's lock while the block runs, after any other run has ended."""
    if out.is_mount():
        raise PrepareError(f"{out} is a mount point and can't be the target of a rename: name a folder below it")
    lock, replaced = FileLock(f"{out}.lock", fallback_to_soft=False), Path(f"{out}.replaced")  # flock ends with us.
    with _writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            say(f"another run is preparing {out}: waiting for it to end")
            lock.acquire()
        if replaced.exists() and not out.exists():
            replaced.rename(out)  # A run was killed between its last two renames.
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PrepareError(f"{error.filename or out} can't be written: {error.strerror}") from error


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)

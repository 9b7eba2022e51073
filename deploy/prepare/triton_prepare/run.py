"""One run: nothing to do, or fetch, quantize, save, verify, and put the result in its place.

What is found to be finished is held against its hashes. Anything else begins anew, but for the download.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from llama_engine.errors import CheckpointError
from llama_engine.model.manifest import MANIFEST, Manifest, PreparedFile, Source, sha256_of

from triton_prepare.errors import MismatchError
from triton_prepare.hub import Hub
from triton_prepare.origin import Origin, Original, original
from triton_prepare.places import Places
from triton_prepare.progress import say, size, stage
from triton_prepare.weights import SavedWeights, read_weights

_PACKAGES = ("torch", "transformers", "bitsandbytes", "safetensors")


@dataclass(frozen=True)
class Order:
    """What is asked for.

    model: a folder or a hub id. revision: of a hub id; None is its default branch. out: the folder to be made.
    device: auto, cpu or cuda. force: prepare anew what is there.
    """

    model: str
    revision: str | None
    out: Path
    device: str = "auto"
    force: bool = False


def prepare(order: Order, hub: Hub) -> Manifest:
    """Have the checkpoint prepared, and return its manifest.

    Raises PrepareError, EngineError where the server would refuse to load it, or OSError for a file of the original.
    """
    asked = original(order.model, order.revision, hub)
    places = Places(order.out)
    # Before the lock: a finished checkpoint may lie on a volume that can't be written.
    if (done := _finished(places, asked, order.force)) is not None:
        return done
    with places.taken():
        # Another run may have finished it meanwhile.
        if (done := _finished(places, asked, order.force)) is not None:
            return done
        return _prepare(order, asked.fetch(), places)


def _finished(places: Places, asked: Original, force: bool) -> Manifest | None:
    """Return the manifest of what is there, if it is what is asked for and unchanged; None if there is nothing."""
    manifest = places.finished()
    if manifest is None or force:
        return None
    if not asked.is_source(manifest.source):
        raise MismatchError(
            f"{places.out} was prepared from {manifest.source.describe()}, not from {asked.describe()}: name another "
            "folder, or have it replaced with --force"
        )
    try:
        manifest.check_sizes(places.out)
        with stage("checking what is there", manifest.bytes) as progress:
            manifest.check_hashes(places.out, progress)
    except CheckpointError as error:
        raise MismatchError(f"{error}; --force prepares it anew") from error
    say(f"nothing to do: {places.out} is the {manifest.describe()}")
    return manifest


def _prepare(order: Order, origin: Origin, places: Places) -> Manifest:
    # Here, because PyTorch takes seconds to import, and most runs end before they need it.
    from triton_prepare.quantize import device_of, quantize, verify

    saved = read_weights(order.model, origin.folder)
    device = device_of(order.device)
    # First, because what a killed run has left takes room.
    places.begin()
    places.check_room(saved.int8_bytes)
    with stage(f"quantizing {size(saved.bytes)} in {saved.dtype} on {device}"):
        expected = quantize(origin.folder, origin.files.kept, places.part, saved.dtype, device)
    manifest = _manifest(origin.source, saved, device.type, places.part)
    (places.part / MANIFEST).write_text(manifest.to_json())
    with stage("verifying: loading it as a server does"):
        verify(places.part, saved.dtype, device, expected)
    places.finish()
    say(f"{places.out}: {size(manifest.bytes)}, {manifest.describe()}")
    return manifest


def _manifest(source: Source, saved: SavedWeights, device: str, folder: Path) -> Manifest:
    """Return the manifest of the files that lie in a folder now."""
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    with stage("hashing", sum(files.values())) as progress:
        prepared = {name: PreparedFile(files[name], sha256_of(folder / name, progress)) for name in files}
    return Manifest(
        source=source,
        # The threshold is the server's default; it has no part in the weights, and any other can be set to serve them.
        settings={"quantization": "int8", "int8_threshold": 0.0, "dtype": saved.dtype, "device": device},
        versions={name: version(name) for name in _PACKAGES},
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        files=prepared,
    )

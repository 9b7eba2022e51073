"""The model repository: its path, its variants, and the checkpoint that it loads."""

import re
from dataclasses import dataclass
from pathlib import Path

from triton_supervisor.settings import DEFAULT_CONFIG

from triton_local.errors import UnknownModelError, UnknownRepositoryError, UnknownVariantError

MODEL_NAME = "llama"
DEFAULT_VARIANT = "default"
"""The name of config.pbtxt, as for Triton."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class ModelRepository:
    """A model repository with our model; `path` is absolute."""

    path: Path

    @classmethod
    def at(cls, path: Path | None) -> "ModelRepository":
        """Return the one at `path`, else the checkout's. Raises UnknownRepositoryError when it isn't one."""
        # The package runs from the checkout (an editable install), three folders below its root.
        chosen = Path(__file__).resolve().parents[3] / "model_repository" if path is None else path.expanduser()
        config = chosen.absolute() / MODEL_NAME / "config.pbtxt"
        if not config.is_file():
            raise UnknownRepositoryError(
                f"{chosen} is no model repository with the model {MODEL_NAME}: {config} is missing; "
                f"name the right folder with --model-repository"
            )
        return cls(chosen.absolute())

    def variants(self) -> tuple[str, ...]:
        """Return "default" and the stems of `configs/*.pbtxt`, sorted."""
        configs = (self.path / MODEL_NAME / "configs").glob("*.pbtxt")
        return (DEFAULT_VARIANT, *sorted(config.stem for config in configs if config.stem != DEFAULT_VARIANT))

    def served_variant(self) -> str:
        """Return the variant to serve unless one is named: `streaming` where there is one, else "default"."""
        return DEFAULT_CONFIG if DEFAULT_CONFIG in self.variants() else DEFAULT_VARIANT

    def check_variant(self, variant: str) -> None:
        """Raise UnknownVariantError with the known ones: Triton would silently fall back to config.pbtxt."""
        if variant not in self.variants():
            raise UnknownVariantError(f"unknown variant {variant!r}: known are {', '.join(self.variants())}")


def resolve_model(value: str) -> str:
    """Return the value of LLAMA_MODEL: the absolute path of an existing folder, or a hub id unchanged.

    Raises UnknownModelError for a path that doesn't exist, and for anything else.
    """
    path = Path(value).expanduser()
    if value and path.is_dir():
        return str(path.absolute())
    if value and path.exists():
        raise UnknownModelError(f"model {value!r} is a file: name the folder that holds config.json")
    # "models/typo" has the form of a hub id; that the folder "models" exists makes it a path.
    means_path = value.endswith("/") or ("/" in value and path.parent.is_dir())
    if means_path or not _HUB_ID.fullmatch(value):
        raise UnknownModelError(f"model {value!r} is neither an existing folder nor a hub id (organisation/name)")
    return value

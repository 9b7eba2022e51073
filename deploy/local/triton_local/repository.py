"""The model repository as the launcher sees it: where it is, which variants it has, which checkpoint it is to load.

Knows the names of files, nothing of what is in them.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from triton_local.errors import UnknownModelError, UnknownRepositoryError, UnknownVariantError

MODEL_NAME = "llama"
DEFAULT_VARIANT = "default"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class ModelRepository:
    """A model repository that has our model in it; `path` is absolute."""

    path: Path

    @classmethod
    def at(cls, path: Path | None) -> "ModelRepository":
        """The one at `path`, else the checkout's own.

        Raises UnknownRepositoryError when it isn't one.
        """
        # The package is used from the checkout (an editable install), three folders below its root.
        chosen = Path(__file__).resolve().parents[3] / "model_repository" if path is None else path.expanduser()
        config = chosen.absolute() / MODEL_NAME / "config.pbtxt"
        if not config.is_file():
            raise UnknownRepositoryError(
                f"{chosen} is no model repository with the model {MODEL_NAME}: {config} is missing; "
                f"name the right folder with --model-repository"
            )
        return cls(chosen.absolute())

    def variants(self) -> tuple[str, ...]:
        """ "default" and the stems of `configs/*.pbtxt`, sorted."""
        configs = (self.path / MODEL_NAME / "configs").glob("*.pbtxt")
        return (DEFAULT_VARIANT, *sorted(config.stem for config in configs if config.stem != DEFAULT_VARIANT))

    def check_variant(self, variant: str) -> None:
        """Raise UnknownVariantError with the list of known ones: Triton itself would silently take config.pbtxt."""
        if variant not in self.variants():
            raise UnknownVariantError(f"unknown variant {variant!r}: known are {', '.join(self.variants())}")


def resolve_model(value: str) -> str:
    """What LLAMA_MODEL is to be: the absolute path of an existing folder, or a hub id as it is.

    Raises UnknownModelError for what looks like a path and doesn't exist, and for what is neither.
    """
    path = Path(value).expanduser()
    if value and path.is_dir():
        return str(path.absolute())
    if value and path.exists():
        raise UnknownModelError(f"model {value!r} is a file: name the folder that holds config.json")
    # "models/typo" has the form of a hub id; the folder "models" here tells what was meant.
    means_path = value.endswith("/") or ("/" in value and path.parent.is_dir())
    if means_path or not _HUB_ID.fullmatch(value):
        raise UnknownModelError(f"model {value!r} is neither an existing folder nor a hub id (organisation/name)")
    return value

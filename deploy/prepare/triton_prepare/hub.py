"""The hub: which commit a revision is, which files it has, and those files on this machine.

Downloads go to huggingface_hub's own cache (HF_HOME), file by file. A file that is there is never fetched again, a
connection that breaks is taken up where it broke; a killed run loses the file it was at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, get_token, hf_hub_download, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
)
from huggingface_hub.hf_api import RepoSibling

from triton_prepare.errors import HubError, PlaceError, PrepareError, first_line
from triton_prepare.progress import Progress


@dataclass(frozen=True)
class Listing:
    """A repository at one commit. files: their sizes in bytes, by name; 0 for one that is in the cache already."""

    model: str
    commit: str
    files: Mapping[str, int]


@dataclass(frozen=True)
class Hub:
    """A hub. endpoint: None is HF_ENDPOINT, or the public one. cache: None is HF_HOME's."""

    endpoint: str | None = None
    cache: Path = field(default_factory=lambda: Path(constants.HF_HUB_CACHE))

    def look_up(self, model: str, revision: str | None) -> Listing:
        """Return what the repository has at a revision; None is its default branch. Raises HubError."""
        with self._explained(model, revision):
            api = HfApi(endpoint=self.endpoint)
            # It also notes in the cache which commit it was, for the day when there is no hub.
            commit = api.resolve_revision(model, revision=revision, cache_dir=self.cache).resolved
            if constants.is_offline_mode():
                return self._cached(model, commit)
            files = api.model_info(model, revision=commit, files_metadata=True).siblings or ()
        return Listing(model, commit, {file.rfilename: self._missing(model, commit, file) for file in files})

    def read(self, listing: Listing, name: str) -> str:
        """Return the text of a small file. Raises HubError."""
        return self.fetch(listing, [name], lambda _: None).joinpath(name).read_text()

    def fetch(self, listing: Listing, names: Sequence[str], progress: Progress) -> Path:
        """Have these files in the cache, and return the folder they lie in. Raises HubError, or OSError."""
        folder = self.cache
        with self._explained(listing.model, listing.commit):
            for name in names:
                path = hf_hub_download(
                    listing.model,
                    name,
                    revision=listing.commit,
                    endpoint=self.endpoint,
                    cache_dir=self.cache,
                    tqdm_class=_passing_on(progress),
                )
                # A file in a subfolder would not lie in the snapshot's folder itself; none of ours does.
                folder = Path(path).parent
        return folder

    @contextmanager
    def _explained(self, model: str, revision: str | None) -> Iterator[None]:
        """Turn what huggingface_hub and the libraries below it raise into one line."""
        asked = f"{model} at {revision}" if revision else model
        try:
            yield
        except PrepareError:
            raise
        except HFValidationError as error:
            raise HubError(f"{model!r} is neither an existing folder nor a hub id (organisation/name)") from error
        except GatedRepoError as error:
            known = "the account of HF_TOKEN has no access yet" if get_token() else "HF_TOKEN isn't set"
            raise HubError(
                f"{model} is gated, and {known}: accept its terms on the hub, and set HF_TOKEN to that account's token"
            ) from error
        except RepositoryNotFoundError as error:
            raise HubError(f"the hub has no {model}, or it is private: check the id, or set HF_TOKEN") from error
        except RevisionNotFoundError as error:
            raise HubError(f"{model} has no revision {revision!r} on the hub") from error
        except (OfflineModeIsEnabled, LocalEntryNotFoundError, RevisionResolutionError) as error:
            if constants.is_offline_mode():
                raise HubError(f"{asked} isn't in the cache as a whole, and HF_HUB_OFFLINE is set") from error
            raise HubError(f"{asked} can't be fetched: {first_line(error.__cause__ or error)}") from error
        except OSError as error:
            if error.errno is not None:
                # This machine's: no room, no permission.
                raise PlaceError(f"{error.filename or self.cache}: {error.strerror}") from error
            raise HubError(f"{asked} can't be fetched: {first_line(error)}") from error
        except Exception as error:
            # The transport has error classes of its own, and so has the one below it.
            raise HubError(f"{asked} can't be fetched: {first_line(error)}") from error

    def _cached(self, model: str, commit: str) -> Listing:
        folder = Path(snapshot_download(model, revision=commit, cache_dir=self.cache, local_files_only=True))
        return Listing(model, commit, {path.name: 0 for path in folder.iterdir()})

    def _missing(self, model: str, commit: str, file: RepoSibling) -> int:
        there = try_to_load_from_cache(model, file.rfilename, cache_dir=self.cache, revision=commit)
        return 0 if isinstance(there, str) else file.size or 0


def _passing_on(progress: Callable[[int], None]) -> Any:  # noqa: ANN401 - it only behaves like a tqdm class
    """Return what huggingface_hub takes for its bar: it passes the bytes on."""

    class PassingOn:
        total: float | None = None
        n = 0

        def __init__(self, *_: object, **__: object) -> None:
            """Whatever a bar is made with."""

        def __enter__(self) -> PassingOn:
            return self

        def __exit__(self, *_: object) -> None: ...

        def update(self, count: float | None = 1) -> None:
            progress(int(count or 0))

        def update_transfer(self, count: float | None = 1) -> None:
            """Bytes on the wire, of files that are put together out of pieces; those of the file are told as well."""

        def set_postfix_str(self, *_: object, **__: object) -> None: ...

        def set_transfer_postfix_str(self, *_: object, **__: object) -> None: ...

        def refresh(self) -> None: ...

        def close(self) -> None: ...

    return PassingOn

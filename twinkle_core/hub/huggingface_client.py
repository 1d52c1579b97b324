"""What models and data sets both need of huggingface_hub: its errors under the project's names, and digests as the hub states them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from twinkle_core.errors import ConfigError, StorageError


@contextmanager
def named_errors(kind: Literal["repository", "dataset"], repo: str, revision: str | None, endpoint: str | None = None) -> Iterator[None]:
    """Raises `ConfigError` for what is not there, `StorageError` when the hub cannot be used.

    `endpoint` is huggingface_hub's; None means its default.
    """
    from huggingface_hub import HfApi

    # HTTPError is that of httpx or httpx2, whichever this huggingface_hub uses
    from huggingface_hub.errors import (  # type: ignore[attr-defined]
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        HTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    hub = HfApi(endpoint=endpoint).endpoint
    where = f"{kind} {repo} at {revision or 'main'}"
    try:
        yield
    except GatedRepoError as error:
        raise ConfigError(f"{where} on {hub} is gated: accept its terms there and log in with `hf auth login`") from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"there is no revision {revision!r} of {kind} {repo} on {hub}: name a branch, a tag or a commit") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(f"there is no {where} on {hub}, or it is private: check the name, or log in with `hf auth login`") from error
    except HFValidationError as error:
        raise ConfigError(f"{repo!r} is no repository name: write hf://organisation/name@revision") from error
    except (HfHubHTTPError, HTTPError, OSError) as error:
        raise StorageError(f"cannot fetch {where} from {hub}: {error}. Try again, or fetch it yourself and name the folder") from error


def digest_as_hub(path: Path, *, is_large: bool) -> str:
    """Of a large file (LFS) the sha256, of a small one git's name of a blob: hex."""
    digest = hashlib.sha256() if is_large else hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()

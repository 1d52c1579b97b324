"""A folder of a model to a repository of a hub, in one commit: all of it is visible, or nothing."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from storage.fingerprint import folder_files
from twinkle_core.errors import ConfigError, StorageError
from twinkle_core.hub import upload_huggingface, upload_modelscope

HUBS: dict[str, Callable[..., str]] = {"hf": upload_huggingface.commit_files, "ms": upload_modelscope.commit_files}
"""Scheme → (folder, names, repository, token, endpoint) -> the commit; raises as `upload_model_folder` says."""
ATTEMPTS = 3
PAUSE_SECONDS = 1.0
"""Before the second attempt; twice as long before each further one."""
LOG = logging.getLogger(__name__)
_TARGET = re.compile(r"(?:(hf|ms)://)?([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)")


def parse_target(target: str) -> tuple[str, str]:
    """('hf', 'org/name') of 'hf://org/name' or 'org/name', ('ms', 'org/name') of 'ms://org/name'. Raises `ConfigError` for others."""
    match = _TARGET.fullmatch(target)
    if match is None:
        raise ConfigError(f"hub_model_id is {target!r}; write hf://organisation/name (or organisation/name) or ms://organisation/name")
    return match[1] or "hf", match[2]


def upload_model_folder(folder: Path, target: str, token: str | None = None, *, endpoint: str | None = None) -> str:
    """Uploads every file of `folder` to the repository `target`, which is made where it is not there. Gives the commit.

    Files whose names begin with a dot stay here, and so do other files of the repository. `token` None is that of HF_TOKEN or
    MODELSCOPE_API_TOKEN, or of the clients' login. A connection that fails is tried again, three times in all; the commit comes last, and
    afterwards the hub has to list every file with the digest that it has here.
    Raises `ConfigError` for a folder or a repository name that is none, and where the hub refuses the token; `StorageError` when the
    hub cannot be used; `DamagedError` when it lists other bytes. No message holds the token.
    """
    scheme, repo = parse_target(target)
    if not folder.is_dir():
        raise ConfigError(f"checkpoint folder {folder} does not exist on this machine")
    names = [name for name in folder_files(folder) if not any(part.startswith(".") for part in name.split("/"))]
    if not names:
        raise ConfigError(f"checkpoint folder {folder} holds no file to upload")
    for attempt in range(1, ATTEMPTS):
        try:
            return HUBS[scheme](folder, names, repo, token, endpoint)
        except StorageError as error:
            LOG.warning("upload to %s failed (%s): attempt %d of %d follows", target, error, attempt + 1, ATTEMPTS)
            time.sleep(PAUSE_SECONDS * 2 ** (attempt - 1))
    return HUBS[scheme](folder, names, repo, token, endpoint)


class BackgroundUploads:
    """Uploads behind training, one after the other."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="upload")
        self._begun: list[Future[str]] = []

    def begin(self, folder: Path, target: str, token: str | None) -> None:
        """Returns at once. A failure is logged when it happens, and raised by `wait`."""
        upload = self._executor.submit(upload_model_folder, folder, target, token)
        upload.add_done_callback(lambda done: _log_failure(done, target))
        self._begun.append(upload)

    def wait(self, seconds: float | None = None) -> bool:
        """Whether all are done, after at most `seconds` (None: once they are). Raises what the first one that failed raised; each is
        raised once."""
        if wait(self._begun, timeout=seconds).not_done:
            return False
        begun, self._begun = self._begun, []
        errors = [error for error in (upload.exception() for upload in begun) if error is not None]
        if errors:
            raise errors[0]
        return True


def _log_failure(upload: Future[str], target: str) -> None:
    if not upload.cancelled() and (error := upload.exception()) is not None:
        LOG.error("upload to %s failed: %s", target, error)

"""What models and data sets both need of ModelScope: modelscope_hub, the client that modelscope is built on, its errors under our names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Literal

from twinkle_core.errors import ConfigError, DamagedError, StorageError


def open_modelscope(endpoint: str | None = None, token: str | None = None) -> Any:
    """The client; None means its defaults: MODELSCOPE_ENDPOINT, and the token of MODELSCOPE_API_TOKEN or of its login.

    Raises `ConfigError` where it is not installed.
    """
    _check_installed()
    from modelscope_hub.api import HubApi
    from modelscope_hub.config import HubConfig

    return HubApi(HubConfig(endpoint=endpoint, token=token))  # its own default would remember the environment of the first call


def default_token() -> str | None:
    """The token that the client takes where none is given. Raises `ConfigError` where the client is not installed."""
    _check_installed()
    from modelscope_hub.config import HubConfig

    return HubConfig().token


def _check_installed() -> None:
    if find_spec("modelscope_hub") is None:
        raise ConfigError("ms:// needs modelscope_hub: run `pip install 'twinkle-flows[data]'`")


@contextmanager
def named_errors(kind: Literal["repository", "dataset"], repo: str, revision: str | None) -> Iterator[None]:
    """Raises `ConfigError` for what is not there, `DamagedError` for other bytes than stated, `StorageError` when the hub fails."""
    from modelscope_hub.errors import FileIntegrityError, HubError, NotExistError
    from requests import RequestException

    where = f"{kind} {repo} at {revision or 'master'}"
    try:
        yield
    except NotExistError as error:
        raise ConfigError(f"there is no {where} on ModelScope, or it is private: check name and revision, or log in ({error})") from error
    except FileIntegrityError as error:
        raise DamagedError(f"a file of {where} is not what ModelScope states: {error}. Try again later") from error
    except (HubError, RequestException, OSError) as error:
        raise StorageError(f"cannot fetch {where} from ModelScope: {error}. Try again, or fetch it yourself and name the folder") from error

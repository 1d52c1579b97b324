from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.store import Store, open_store
from tests.servers import create_bucket, s3_server


@pytest.fixture(scope="session")
def s3_environment() -> Iterator[dict[str, str]]:
    with s3_server() as environment:
        create_bucket(environment, "tests")
        yield environment


@pytest.fixture
def s3_settings(s3_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The server's settings, in the environment of this test; its bucket is 'tests'."""
    for variable, value in s3_environment.items():
        monkeypatch.setenv(variable, value)
    return s3_environment


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))

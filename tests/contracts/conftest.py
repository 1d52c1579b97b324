from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.store import Store, open_store
from tests.servers import create_bucket, s3_server


@pytest.fixture(scope="session")
def s3_environment() -> Iterator[dict[str, str]]:
    with s3_server() as environment:
        create_bucket(environment, "contract")
        yield environment


@pytest.fixture(params=["file", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty store of each kind."""
    name = uuid.uuid4().hex
    if request.param == "file":
        return open_store(str(tmp_path / "store"))
    if request.param == "memory":
        return open_store(f"memory://{name}")
    for variable, value in request.getfixturevalue("s3_environment").items():
        monkeypatch.setenv(variable, value)
    return open_store(f"s3://contract/{name}")

"""The whole flow on S3: nothing of it, releases included, needs a local store."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from storage.artifact import list_records, verify_record
from storage.errors import StorageError
from storage.store import Store, open_store
from tests.end_to_end.conftest import run_flow, values
from tests.servers import create_bucket, s3_server
from tests.storage.test_s3 import Proxy
from twinkle_core.hub.publish import read_release, verify_release

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
STORE, RELEASES = "s3://flow/store", "s3://flow/out/releases"


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with s3_server() as environment:
        create_bucket(environment, "flow")
        yield environment


@pytest.fixture
def on_s3(s3: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Store]:
    """Puts an S3 store into the environment of this test."""

    def use(url: str) -> Store:
        for name, value in {**s3, "TWINKLE_STORE": url}.items():
            monkeypatch.setenv(name, value)
        return open_store(url)

    return use


@pytest.fixture
def settings(rows: Path, tiny_llama: Path) -> dict[str, Any]:
    return values(rows, tiny_llama, publish__target=RELEASES)


def test_a_store_on_s3_computes_what_a_folder_does_and_then_reuses_it_from_anywhere(
    prefect_server: str, finished: tuple[Path, dict[str, str]], on_s3: Callable[[str], Store], settings: dict[str, Any], tmp_path: Path
) -> None:
    store = on_s3(STORE)
    first = run_flow(settings)
    records = {record.key: record for record in list_records(store)}
    assert [problem for record in records.values() for problem in verify_record(store, record)] == []
    assert not (tmp_path / "twinkle-home" / "store").exists()
    local = {record.key: record.digest for record in list_records(open_store(str(finished[0] / "store"))) if record.stage != "publish"}
    assert {key: record.digest for key, record in records.items() if record.stage != "publish"} == local

    assert first["release"].startswith(f"{RELEASES}/tiny/")
    releases = open_store(RELEASES)
    version = first["release"].rsplit("/", 1)[1]
    release = read_release(releases, "tiny", version)
    assert release is not None
    assert verify_release(releases, release) == []
    assert json.loads(releases.get("tiny/LATEST.json"))["version"] == version
    assert any(entry.path == "model.safetensors" for entry in release.files)

    with pytest.MonkeyPatch.context() as elsewhere:  # another machine: an empty home, the same store
        elsewhere.setenv("TWINKLE_HOME", str(tmp_path / "elsewhere"))
        again = run_flow(settings)
    assert again["release"] == first["release"]
    assert Path(again["report"]).is_relative_to(tmp_path / "elsewhere")
    assert Path(again["report"]).read_bytes() == Path(first["report"]).read_bytes()
    assert {record.key: record.attempt for record in list_records(store)} == {key: record.attempt for key, record in records.items()}


def test_a_store_that_ignores_conditional_writes_is_refused_before_the_first_stage(
    prefect_server: str, s3: dict[str, str], on_s3: Callable[[str], Store], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    direct = on_s3("s3://flow/careless")
    with Proxy(urlsplit(s3["AWS_ENDPOINT_URL"]).netloc) as proxy:
        proxy.dropped_headers = ("if-none-match", "if-match")
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.server_address[1]}")
        with pytest.raises(StorageError, match="s3://flow/careless cannot be used.*If-None-Match"):
            run_flow(settings)
        proxy.shutdown()
    assert proxy.num_misbehaved
    assert direct.list() == []

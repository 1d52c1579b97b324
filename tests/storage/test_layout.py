from __future__ import annotations

from collections.abc import Callable

import pytest

from storage import layout
from storage.errors import StorageError
from storage.uri import check_key

SPELLED = {
    layout.record_key("encode", "abc"): "records/encode/abc.json",
    layout.data_prefix("encode", "abc", "att1"): "data/encode/abc/att1",
    layout.lease_key("encode", "abc"): "leases/encode/abc.json",
    layout.run_spec_key("run1"): "runs/run1/spec.json",
    layout.head_key("abc"): "checkpoints/abc/HEAD.json",
    layout.checkpoint_prefix("abc", 20, 3): "data/train/abc/step-000000020-e3",
    layout.checkpoint_manifest_key("data/train/abc/step-000000020-e3"): "data/train/abc/step-000000020-e3/MANIFEST.json",
    layout.releases_prefix(): "releases",
    layout.artifacts_prefix(): "records",
    layout.artifacts_prefix("encode"): "records/encode",
}


def test_keys_are_spelled_as_the_page_says_and_are_keys() -> None:
    assert len(SPELLED) == 10
    for got, wanted in SPELLED.items():
        assert got == wanted == check_key(got)


def test_steps_list_in_order() -> None:
    prefixes = [layout.checkpoint_prefix("k", step, 1) for step in (2, 10, 100, 99_999)]
    assert prefixes == sorted(prefixes)


@pytest.mark.parametrize("bad", ["", "..", ".hidden", "a/b", "a b", "a\\b", "é", "x" * 201, "-a", "a\n"])
@pytest.mark.parametrize(
    "spell",
    [
        lambda bad: layout.record_key(bad, "k"),
        lambda bad: layout.record_key("s", bad),
        lambda bad: layout.data_prefix("s", "k", bad),
        lambda bad: layout.lease_key("s", bad),
        lambda bad: layout.run_spec_key(bad),
        lambda bad: layout.head_key(bad),
        lambda bad: layout.checkpoint_prefix(bad, 1, 1),
    ],
)
def test_no_part_can_leave_its_place(spell: Callable[[str], str], bad: str) -> None:
    with pytest.raises(StorageError, match="cannot be part of a key"):
        spell(bad)

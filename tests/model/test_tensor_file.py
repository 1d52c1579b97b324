"""Files and copies that training does not wait for hold the same bytes as those that it would."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file as their_save_file

from twinkle_core.model.host_copies import HostCopies
from twinkle_core.model.tensor_file import DTYPES, save_file


def test_a_file_is_the_librarys_to_the_byte(tmp_path: Path) -> None:
    tensors = {f"tensor {i} \\ é": torch.arange(3 * i + 3).reshape(3, -1).to(dtype) for i, (_, dtype) in enumerate(DTYPES)}
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 3), 'quo"te': torch.randn(7)}
    save_file(tensors, tmp_path / "ours", {"format": "pt"})
    their_save_file(tensors, tmp_path / "theirs", {"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    with pytest.raises(ValueError, match="t is on cpu, contiguous: False"):
        save_file({"t": torch.zeros(2, 3).T}, tmp_path / "x", {})


def test_a_full_disk_is_told_with_the_file() -> None:
    with pytest.raises(OSError, match="No space left.*/dev/full") as caught:
        save_file({"t": torch.zeros(9)}, Path("/dev/full"), {})
    assert caught.value.errno == errno.ENOSPC


def test_copies_keep_their_memory_and_later_steps_do_not_touch_them() -> None:
    copies = HostCopies()
    live = {"a": torch.arange(6.0).reshape(2, 3).T, "b": torch.tensor(1.0)}
    first = copies.take("weights", live)
    assert all(torch.equal(first[name], live[name]) and first[name].is_contiguous() for name in live)
    live["a"].zero_()
    assert float(first["a"].sum()) == 15.0
    second = copies.take("weights", {"a": live["a"]})
    assert second["a"].data_ptr() == first["a"].data_ptr()
    assert second.keys() == {"a"}
    assert copies.take("other", live)["a"].data_ptr() != second["a"].data_ptr()
    grown = copies.take("weights", {"a": torch.ones(4)})
    assert torch.equal(grown["a"], torch.ones(4))

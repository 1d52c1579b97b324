"""Rows with images, through a template that takes them, in every dataset that does not pack."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.dataset.chats import chats, plain
from twinkle_core.dataset import Dataset, DatasetMeta, IterableDataset, IterablePackingDataset, LazyDataset, PackingDataset, encoded_sample
from twinkle_core.errors import ConfigError, DataError
from twinkle_core.template.qwen3_5 import Qwen3_5Template

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def image_template(tmp_path_factory: pytest.TempPathFactory) -> Qwen3_5Template:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    specials = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
    names = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(specials)
    folder = tmp_path_factory.mktemp("images")
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": CHAT})
    )
    size = {"shortest_edge": 32 * 32, "longest_edge": 64 * 64}
    Qwen2VLImageProcessorPil(patch_size=8, merge_size=2, temporal_patch_size=2, size=size).save_pretrained(folder)
    return Qwen3_5Template(folder, max_length=200)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Two conversations about pictures, a longer one, and one without."""
    folder = tmp_path_factory.mktemp("pictures")
    for seed in range(3):
        pixels = np.random.default_rng(seed).integers(0, 255, (30, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{seed}.png")
    with_images = chats([3, 4, 190])
    for seed, row in enumerate(with_images):
        row["messages"][0]["content"] = "<image> What is it?"
        row["images"] = [str(folder / f"{seed}.png")]
    return [*with_images[:2], *chats([5]), with_images[2]]


@pytest.mark.parametrize("cls", [Dataset, LazyDataset, IterableDataset])
def test_features_have_the_pixels_of_their_row(cls: Any, rows: list[dict[str, Any]], image_template: Qwen3_5Template) -> None:
    dataset = cls(DatasetMeta(data=rows[:3]))
    dataset.set_template(image_template)
    dataset.encode()
    features = list(dataset)
    expected = image_template.batch_encode(rows[:3])  # type: ignore[arg-type]
    names = ("input_ids", "labels", "seq_lens", "kinds")
    for feature, sample in zip(features, expected, strict=True):
        back = encoded_sample(feature)
        assert type(back) is type(sample)
        assert [getattr(back, name).tolist() for name in names] == [getattr(sample, name).tolist() for name in names]
    for number in (0, 1):
        assert features[number]["position_ids"].shape == (3, features[number]["length"])
        assert np.array_equal(features[number]["pixel_values"], expected[number].pixel_values)  # type: ignore[union-attr]
        assert features[number]["image_grid_thw"].tolist() == expected[number].image_grid_thw.tolist()  # type: ignore[union-attr]
    assert "pixel_values" not in features[2]
    assert plain(dataset) == plain(features)


def test_a_row_with_an_image_that_is_too_long_is_counted_or_named(rows: list[dict[str, Any]], image_template: Qwen3_5Template) -> None:
    raising = Dataset(DatasetMeta(data=rows))
    raising.set_template(image_template)
    with pytest.raises(DataError, match="row 4: .* tokens with images"):
        raising.encode()
    raising.check()
    assert raising.report["refused"] == 1
    deleting = Dataset(DatasetMeta(data=rows))
    deleting.set_template("Qwen3_5Template", model_id=image_template.folder, max_length=200, truncation_strategy="delete")
    deleting.encode()
    assert (len(deleting), deleting.report["dropped"]["too_long"]) == (3, 1)


def test_pixels_are_not_packed(rows: list[dict[str, Any]], image_template: Qwen3_5Template) -> None:
    packed, stream = PackingDataset(DatasetMeta(data=rows[:3])), IterablePackingDataset(DatasetMeta(data=rows[:3]))
    for dataset in (packed, stream):
        dataset.set_template(image_template)
        dataset.encode()
    with pytest.raises(ConfigError, match="images are not packed"):
        packed.pack_dataset()
    stream.pack_dataset()
    with pytest.raises(DataError, match="images are not packed"):
        list(stream)

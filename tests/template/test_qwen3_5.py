"""Images from the row to the logits, against transformers' own processor and a tiny random Qwen 3.5 and Qwen 3 VL."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.tokenizers import tokenizer_files
from twinkle_core.config import TemplateConfig
from twinkle_core.errors import ConfigError, DataError
from twinkle_core.processor import InputProcessor
from twinkle_core.template import Template
from twinkle_core.template.multimodal import MultimodalSample, inline_images, load_image, mrope_positions
from twinkle_core.template.qwen3_5 import Qwen3_5Template
from twinkle_core.types import IGNORE, EncodedSample, Trajectory

VISION = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *VISION, "<|video_pad|>", "<think>", "</think>"]
CHAT = (
    "{%- macro text(content) -%}{%- if content is string -%}{{ content }}{%- else -%}{%- for part in content -%}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}{%- endfor -%}{%- endif -%}{%- endmacro -%}"
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' and loop.last and enable_thinking is defined and not enable_thinking -%}{{ '<think>\n\n</think>\n\n' }}"
    "{%- endif -%}{{ text(m.content) + '<|im_end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
"""A chat template in the manner of Qwen's for images, with a switch for thinking."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", extra_special_tokens=SPECIALS[1:7]
    )
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = CHAT
    made = tmp_path_factory.mktemp("qwen3_5")
    tokenizer.save_pretrained(made)
    size = {"shortest_edge": 32 * 32, "longest_edge": 96 * 96}
    Qwen2VLImageProcessorPil(patch_size=8, merge_size=2, temporal_patch_size=2, size=size).save_pretrained(made)
    return made


def picture(seed: int, width: int = 40, height: int = 30) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def png(seed: int) -> bytes:
    out = io.BytesIO()
    picture(seed).save(out, format="PNG")
    return out.getvalue()


def talk(*images: Any, answer: str = "A cat.") -> Trajectory:
    """Images as parts without a reference of their own, as the preprocess stage keeps them."""
    parts = [part for _ in images for part in ({"type": "image"}, {"type": "text", "text": " and "})]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "images": list(images)}  # type: ignore[typeddict-item]


def oracle(template: Qwen3_5Template, text: str, images: list[Image.Image]) -> Any:
    """What transformers' own processor makes of the rendered text and the images (its video part needs torchvision, and is left out)."""
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    class Processor(Qwen3VLProcessor):  # type: ignore[misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return type(argument)

    processor = Processor(image_processor=template.image_processor, tokenizer=template.tokenizer, video_processor=None)
    return processor(text=[text], images=images, return_tensors="np")


def model(kind: str, tokenizer: Any) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{mark}|>") for name, mark in (
        ("image_token_id", "image_pad"), ("video_token_id", "video_pad"),
        ("vision_start_token_id", "vision_start"), ("vision_end_token_id", "vision_end"))}  # fmt: skip
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
    }  # fmt: skip
    vision: dict[str, Any] = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 8, "out_hidden_size": 32,
        "num_position_embeddings": 64,
    }  # fmt: skip
    if kind == "qwen3_5":
        linear = {f"linear_{name}": size for name, size in (
            ("key_head_dim", 8), ("value_head_dim", 8), ("num_key_heads", 2), ("num_value_heads", 4))}  # fmt: skip
        text |= linear | {"layer_types": ["linear_attention", "full_attention"]}
        text["rope_parameters"] |= {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
        config = transformers.Qwen3_5Config(text_config=text, vision_config=vision, **ids)
        return transformers.Qwen3_5ForConditionalGeneration(config).eval()
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision | {"deepstack_visual_indexes": [0]}, **ids)
    return transformers.Qwen3VLForConditionalGeneration(config).eval()


def forward(model: Any, sample: EncodedSample | MultimodalSample) -> tuple[Any, float]:
    """Logits and the mean loss of the supervised tokens."""
    import torch

    batch = InputProcessor().collate([sample])
    labels = batch.pop("labels")
    batch.pop("seq_lens")
    with torch.no_grad():
        logits = model(**batch, use_cache=False).logits
    return logits, float(torch.nn.functional.cross_entropy(logits[0], labels[0], ignore_index=IGNORE))


def supervised(template: Template, sample: EncodedSample | MultimodalSample) -> str:
    return template.decode(sample.labels[sample.labels != IGNORE])


def test_ids_pixels_and_grids_are_those_of_transformers_own_processor(folder: Path) -> None:
    template = Qwen3_5Template(folder)
    images = [picture(1), picture(2, 100, 20)]
    sample = template.encode(talk(*images))
    assert isinstance(sample, MultimodalSample)
    text = template.tokenizer.apply_chat_template(talk(*images)["messages"], tokenize=False)
    expected = oracle(template, text, images)
    assert sample.input_ids.tolist() == expected["input_ids"][0].tolist()
    assert np.array_equal(sample.pixel_values, expected["pixel_values"])
    assert sample.image_grid_thw.tolist() == expected["image_grid_thw"].tolist()
    pad = template.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert (sample.input_ids == pad).sum() == sample.image_grid_thw.prod(axis=1).sum() // 4 > 2


def test_ids_are_the_processors_own_with_the_real_tokenizer_and_chat_template_of_qwen_3(folder: Path, tmp_path: Path) -> None:
    for path in (*tokenizer_files("qwen3").iterdir(), folder / "preprocessor_config.json"):
        (tmp_path / path.name).symlink_to(path)
    template = Qwen3_5Template(tmp_path)
    messages: Any = [
        {"role": "system", "content": "Look closely."},
        {"role": "user", "content": "First <image>, then <image>: 有什么不同? 😀"},
        {"role": "assistant", "content": "One is wider."},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Yes.", "reasoning_content": "100 > 40"},
    ]
    images = [picture(1), picture(2, 100, 20)]
    sample = template.encode({"messages": messages, "images": images})
    inlined, _ = inline_images(messages, images, "".join(VISION))
    expected = oracle(template, template.tokenizer.apply_chat_template(inlined, tokenize=False), images)
    assert sample.input_ids.tolist() == expected["input_ids"][0].tolist()
    assert supervised(template, sample) == "One is wider.<|im_end|><think>\n100 > 40\n</think>\n\nYes.<|im_end|>"


def test_a_prompt_ends_where_the_answer_starts(folder: Path) -> None:
    template = Qwen3_5Template(folder)
    row = talk(picture(1))
    whole, prompt = template.encode(row), template.encode({**row, "messages": row["messages"][:1]}, add_generation_prompt=True)
    assert isinstance(prompt, MultimodalSample)
    assert prompt.num_loss_tokens == 0
    assert whole.input_ids[: len(prompt.input_ids)].tolist() == prompt.input_ids.tolist()
    assert template.decode(whole.input_ids[len(prompt.input_ids) :]) == "A cat.<|im_end|>\n"


def test_ids_for_vllm_hold_each_image_once(folder: Path) -> None:
    template = Qwen3_5Template(folder)
    ids = template.get_vllm_input_ids(template.encode(talk(picture(1), picture(2, 100, 20))).input_ids)
    text = template.tokenizer.apply_chat_template(talk(1, 2)["messages"], tokenize=False)
    assert ids == template.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert template.get_vllm_input_ids([]) == []


def test_only_the_answer_is_learnt_and_no_token_of_an_image(folder: Path) -> None:
    sample = Qwen3_5Template(folder).encode(talk(picture(1)))
    template = Qwen3_5Template(folder, learn="all")
    everything = template.encode(talk(picture(1)))
    assert supervised(template, sample) == "A cat.<|im_end|>"
    assert supervised(template, everything) == "user\n and What is it?<|im_end|>\n<|im_start|>assistant\nA cat.<|im_end|>\n"
    ids = [template.tokenizer.convert_tokens_to_ids(mark) for mark in VISION]
    assert not np.isin(everything.labels, ids).any()
    targets = np.flatnonzero(everything.labels != IGNORE)
    assert (everything.labels[targets] == everything.input_ids[targets + 1]).all()


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_vl"])
def test_positions_are_the_models_own_and_pixels_reach_the_loss(kind: str, folder: Path) -> None:
    import torch

    template = Qwen3_5Template(folder)
    first, second = (template.encode(talk(picture(seed), picture(3, 90, 40))) for seed in (1, 2))
    assert isinstance(first, MultimodalSample)
    assert first.input_ids.tolist() == second.input_ids.tolist()
    tiny = model(kind, template.tokenizer)
    pad = template.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    ids = torch.from_numpy(first.input_ids.astype(np.int64))[None]
    own, _ = tiny.model.get_rope_index(ids, (ids == pad).int(), torch.from_numpy(first.image_grid_thw))
    assert first.position_ids.tolist() == own[:, 0].tolist()
    (logits, loss), (other, _) = forward(tiny, first), forward(tiny, second)
    assert np.isfinite(loss)
    assert loss > 0
    assert not torch.equal(logits[0, -3:], other[0, -3:])
    assert torch.equal(logits[0, :3], other[0, :3]), "what stands before the image does not see it"


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4), st.integers(1, 4)), max_size=4), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_positions_of_any_layout_are_those_of_get_rope_index(images: list[tuple[int, int, int]], tail: int) -> None:
    import torch
    from transformers import Qwen3_5Config, Qwen3_5Model

    is_image, grids = [], []
    for number, (text, rows, columns) in enumerate(images):
        is_image += [False] * (text + (number > 0)) + [True] * (rows * columns)  # images never touch: vision_end and vision_start part them
        grids.append([1, rows * 2, columns * 2])
    is_image += [False] * (tail + 1)
    grid = np.array(grids, dtype=np.int64).reshape(-1, 3)
    bare = Qwen3_5Model.__new__(Qwen3_5Model)  # only its position arithmetic
    torch.nn.Module.__init__(bare)
    bare.config = Qwen3_5Config()
    kinds = torch.tensor([is_image]).int()
    own, _ = Qwen3_5Model.get_rope_index(bare, torch.zeros_like(kinds, dtype=torch.long), kinds, torch.from_numpy(grid))
    assert mrope_positions(np.array(is_image), grid, 2).tolist() == own[:, 0].tolist()


def test_image_tokens_that_are_not_those_of_the_grids_are_refused() -> None:
    grid = np.array([[1, 4, 4]])
    for is_image in ([True] * 3, [True] * 2 + [False] + [True] * 2, [False] * 4):
        with pytest.raises(DataError, match="does not stand whole"):
            mrope_positions(np.array(is_image), grid, 2)
    with pytest.raises(DataError, match="1 image tokens more than the 1 images"):
        mrope_positions(np.array([True] * 4 + [False, True]), grid, 2)


@pytest.mark.parametrize("thinking", [None, True, False])
def test_a_conversation_without_images_is_encoded_as_by_template(thinking: bool | None, folder: Path) -> None:
    rows: list[Any] = [
        {"messages": [{"role": "user", "content": "an <image> tag"}, {"role": "assistant", "content": "yes"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "parts"}]}, {"role": "assistant", "content": "no"}]},
    ]
    ours = Qwen3_5Template(folder, enable_thinking=thinking).batch_encode(rows)
    theirs = Template(folder, enable_thinking=thinking).batch_encode(rows)
    for mine, expected in zip(ours, theirs, strict=True):
        assert type(mine) is EncodedSample
        assert mine.input_ids.tolist() == expected.input_ids.tolist()
        assert mine.labels.tolist() == expected.labels.tolist()


def test_a_preference_pair_has_its_images_in_both_documents(folder: Path) -> None:
    row: Any = talk(picture(1))
    row["rejected_messages"] = [row["messages"][0], {"role": "assistant", "content": "A dog, I think."}]
    template = Qwen3_5Template(folder)
    sample, chosen = template.encode(row), template.encode(talk(picture(1)))
    assert isinstance(sample, MultimodalSample)
    assert isinstance(chosen, MultimodalSample)
    assert sample.kinds.tolist() == [1, 2]
    assert sample.input_ids[: sample.seq_lens[0]].tolist() == chosen.input_ids.tolist()
    assert sample.image_grid_thw.tolist() == chosen.image_grid_thw.tolist() * 2
    assert sample.position_ids[:, sample.seq_lens[0]].tolist() == [0, 0, 0]
    assert np.array_equal(sample.pixel_values, np.concatenate([chosen.pixel_values] * 2))


def test_weights_of_turns_follow_the_tokens(folder: Path) -> None:
    row: Any = talk(picture(1))
    row["messages"][1]["loss_weight"] = 0.5
    sample = Qwen3_5Template(folder).encode(row)
    assert sample.loss_weights is not None
    assert set(sample.loss_weights[sample.labels != IGNORE].tolist()) == {0.5}
    assert sample.loss_weight == 0.5 * sample.num_loss_tokens


def test_a_sample_with_images_is_never_cut(folder: Path) -> None:
    length = len(Qwen3_5Template(folder).encode(talk(picture(1))).input_ids)
    assert len(Qwen3_5Template(folder, max_length=length).encode(talk(picture(1))).input_ids) == length
    for strategy in ("raise", "left", "right", "split"):
        with pytest.raises(DataError, match=f"{length} tokens with images.*max_length is {length - 1}"):
            Qwen3_5Template(folder, max_length=length - 1, truncation_strategy=strategy).encode(talk(picture(1)))
    template = Qwen3_5Template(folder, max_length=length - 1, truncation_strategy="delete")
    short: Any = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    assert [type(sample) for sample in template.batch_encode([talk(picture(1)), short])] == [EncodedSample]
    with pytest.raises(DataError, match="too_long"):
        template.encode(talk(picture(1)))


def test_the_encode_stage_refuses_images_rather_than_lose_them(folder: Path) -> None:
    row = talk(picture(1))
    placeholder: Any = {"messages": [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "x"}], "images": ["a.png"]}
    for one in (row, placeholder):
        with pytest.raises(DataError, match="image"):
            Qwen3_5Template(folder).encoder().outcomes([one])


def test_a_reference_is_a_path_bytes_a_data_uri_or_an_image(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(1))
    uri = "data:image/png;base64," + base64.b64encode(png(1)).decode()
    stored = {"bytes": png(1), "path": None}
    for reference in (
        str(tmp_path / "a.png"),
        tmp_path / "a.png",
        png(1),
        uri,
        picture(1),
        stored,
        {"bytes": None, "path": str(tmp_path / "a.png")},
    ):
        assert np.array_equal(np.asarray(load_image(reference)), np.asarray(picture(1)))
    assert load_image("a.png", root=tmp_path).size == (40, 30)


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("https://example.org/a.png", "nothing is fetched here: download it"),
        ("s3://bucket/a.png", "nothing is fetched here"),
        ("data:image/png,abc", "not base64"),
        ("data:image/png;base64,?", "no valid base64"),
        (b"no image", "cannot read the image given as bytes"),
        (png(1)[:60], "cannot read the image given as bytes"),
        ("missing.png", "cannot read the image 'missing.png'"),
        (3, "an image is a path, bytes, a data URI or a PIL image, got int"),
        ("../a.png", "lies outside"),
    ],
)
def test_other_references_are_refused(reference: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=reason):
        load_image(reference, root=tmp_path)


def test_an_image_is_turned_as_its_exif_tag_says() -> None:
    out, tag = io.BytesIO(), Image.Exif()
    tag[0x0112] = 6
    picture(1).save(out, format="PNG", exif=tag)
    assert load_image(out.getvalue()).size == (30, 40)


def test_each_image_has_its_place() -> None:
    messages: Any = [
        {"role": "user", "content": "<image>a<image>"},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "b"}]},
    ]
    inlined, references = inline_images(messages, ["x", "y", "z"], "#")
    assert ([message["content"] for message in inlined], references) == (["#a#", "#b"], ["x", "y", "z"])
    own: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}, {"type": "image", "image": "v"}]}]
    assert inline_images(own, [], "#")[1] == ["u", "v"]
    assert inline_images([{"role": "user", "content": "<image>"}], [], "#") == ([{"role": "user", "content": "<image>"}], [])
    for images, reason in ((["x", "y"], "more image placeholders than the 2"), (["x"] * 4, "4 images are listed, but the messages have 3")):
        with pytest.raises(DataError, match=reason):
            inline_images(messages, images, "#")
    with pytest.raises(DataError, match="image 1 is 'u' in its message, but 'x' in the list"):
        inline_images(own, ["x", "v"], "#")
    with pytest.raises(DataError, match="without a reference"):
        inline_images([{"role": "user", "content": [{"type": "image"}]}], [], "#")
    with pytest.raises(DataError, match="'video' is neither text nor image"):
        inline_images([{"role": "user", "content": [{"type": "video"}]}], ["x"], "#")


def test_a_batch_names_its_bad_row_or_leaves_it_out(folder: Path) -> None:
    bad: Any = {**talk(picture(1)), "images": ["missing.png"]}
    with pytest.raises(DataError, match=r"^conversation 2: cannot read the image 'missing.png'"):
        Qwen3_5Template(folder).batch_encode([talk(picture(1)), bad])
    with pytest.raises(DataError, match=r"^conversation 2: (?!conversation)"):
        Qwen3_5Template(folder).batch_encode([talk(picture(1)), {"messages": [{"role": "user", "content": 3}]}])  # type: ignore[list-item]
    skipping = Qwen3_5Template(folder, TemplateConfig(on_bad_row="skip"))
    assert len(skipping.batch_encode([talk(picture(1)), bad, talk(picture(2))])) == 2


def test_paths_stay_inside_the_image_root(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(png(1))
    (tmp_path / "b.png").write_bytes(png(1))
    template = Qwen3_5Template(folder)
    template.image_root = tmp_path / "in"
    assert template.encode(talk("a.png")).input_ids.tolist() == Qwen3_5Template(folder).encode(talk(picture(1))).input_ids.tolist()
    for outside in ("../b.png", str(tmp_path / "b.png")):
        with pytest.raises(DataError, match="lies outside"):
            template.encode(talk(outside))


def test_a_model_without_image_tokens_or_processor_says_so(folder: Path, tokenizer_folder: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot load the image processor"):
        Qwen3_5Template(tokenizer_folder(CHAT)).encode(talk(picture(1)))
    for path in (*tokenizer_folder(CHAT).iterdir(), folder / "preprocessor_config.json"):
        (tmp_path / path.name).symlink_to(path)
    with pytest.raises(ConfigError, match=r"has no token '<\|vision_start\|>'"):
        Qwen3_5Template(tmp_path).encode(talk(picture(1)))


def test_video_a_stray_image_token_and_images_beside_plain_text_are_refused(folder: Path) -> None:
    template = Qwen3_5Template(folder)
    row: Any = talk(picture(1))
    with pytest.raises(DataError, match="the row has videos"):
        template.encode({**row, "videos": ["a.mp4"]})
    with pytest.raises(DataError, match="audios"):
        template.encode({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "audios": ["a.wav"]})
    row["messages"][1]["content"] = "see <|image_pad|>"
    with pytest.raises(DataError, match="2 image tokens for 1 images"):
        template.encode(row)
    with pytest.raises(DataError, match="images stand in conversations"):
        template.encode({"messages": [], "text": "a <image>", "images": [picture(1)]})

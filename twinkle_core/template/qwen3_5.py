"""The template of Qwen 3.5 and of Qwen 2 VL to 3 VL: text as `Template` encodes it, and images. Those need pillow, not torchvision."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from twinkle_core.errors import ConfigError, DataError
from twinkle_core.template.base import Template
from twinkle_core.template.multimodal import MultimodalSample, has_images, inline_images, load_image, mrope_positions
from twinkle_core.types import IGNORE, EncodedSample, Trajectory, kind_of

IMAGE_TOKEN = "<|image_pad|>"
IMAGE_MARKS = ("<|vision_start|>", IMAGE_TOKEN, "<|vision_end|>")
"""Texts of the tokens that an image stands as; `IMAGE_TOKEN` once for each of its merged patches."""


class Qwen3_5Template(Template):
    """`Template`, of which `encode` and `batch_encode` also take images and then give a `MultimodalSample`.

    Images are resized and normalised as `preprocessor_config.json` of the model's folder says, by transformers' processor on PIL and
    numpy. A sample with images is never cut: longer than `max_length`, truncation 'delete' drops it and every other one raises.
    Videos and audios are refused, and so are images in `outcomes` and `encoder()`, whose samples hold no pixels.
    """

    image_root: Path | None = None
    """The folder that relative paths of images start from and that none may leave; None takes any path of this machine."""

    def encode(  # type: ignore[override]
        self, trajectory: Trajectory, add_generation_prompt: bool = False
    ) -> EncodedSample | MultimodalSample:
        """One sample. Raises `DataError` where it cannot be encoded, is to be dropped, or is cut into several."""
        if not has_images(trajectory):
            return super().encode(trajectory, add_generation_prompt)
        sample = self._with_images(trajectory, add_generation_prompt)
        if sample is None:
            raise DataError("the conversation with images is dropped: too_long")
        return sample

    def batch_encode(  # type: ignore[override]
        self, trajectories: Sequence[Trajectory], add_generation_prompt: bool = False
    ) -> list[EncodedSample | MultimodalSample]:
        """All samples in order: none of a trajectory that is dropped or skipped, several of one without images that is split.

        Raises `DataError` that starts with 'conversation K' (from 1) for a bad one.
        """
        if not any(has_images(trajectory) for trajectory in trajectories):
            return [*super().batch_encode(trajectories, add_generation_prompt)]
        samples: list[EncodedSample | MultimodalSample] = []
        for number, trajectory in enumerate(trajectories, start=1):
            try:
                samples += self._samples(trajectory, add_generation_prompt)
            except DataError as error:
                if self.config.on_bad_row != "skip":
                    raise DataError(f"conversation {number}: {str(error).removeprefix('conversation 1: ')}") from error
        return samples

    def get_vllm_input_ids(self, input_ids: Sequence[int] | np.ndarray) -> list[int]:
        """The ids with one image token for each image, as vLLM takes a prompt (https://docs.vllm.ai) and expands it itself."""
        ids, image = np.asarray(input_ids), self._token_id(IMAGE_TOKEN)
        repeated = (ids[1:] == image) & (ids[:-1] == image)
        return [int(token) for token in np.delete(ids, np.flatnonzero(repeated) + 1)]

    @cached_property
    def image_processor(self) -> Any:
        """The model's own; its `size` bounds the number of pixels and may be set."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        try:
            return Qwen2VLImageProcessorPil.from_pretrained(str(self.folder), local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot load the image processor in {self.folder}: {error}") from error

    def _samples(self, trajectory: Trajectory, add_generation_prompt: bool) -> Sequence[EncodedSample | MultimodalSample]:
        if not has_images(trajectory):
            return super().batch_encode([trajectory], add_generation_prompt)
        sample = self._with_images(trajectory, add_generation_prompt)
        return [] if sample is None else [sample]

    def _with_images(self, trajectory: Trajectory, add_generation_prompt: bool) -> MultimodalSample | None:
        """None where it is too long and dropped."""
        text, references = self._inlined(trajectory)
        whole = dataclasses.replace(self.encoder(), max_length=sys.maxsize, truncation="raise", skip_bad_rows=False)
        [outcome] = whole.outcomes([text], add_generation_prompt=add_generation_prompt)
        [sample] = outcome.samples
        images = self.image_processor([load_image(reference, self.image_root) for reference in references], return_tensors="np")
        grids, merge = images["image_grid_thw"].astype(np.int64), self.image_processor.merge_size
        marks = np.array([self._token_id(mark) for mark in IMAGE_MARKS])
        is_image = sample.input_ids == marks[1]
        if is_image.sum() != len(grids):
            raise DataError(f"{is_image.sum()} image tokens for {len(grids)} images: a text holds {IMAGE_TOKEN!r}")
        copies = np.ones(len(is_image), dtype=np.int64)
        copies[is_image] = grids.prod(axis=1) // merge**2
        starts = np.cumsum(sample.seq_lens) - sample.seq_lens
        seq_lens = np.add.reduceat(copies, starts).astype(np.int32)
        if self._too_long(int(seq_lens.max())):
            return None
        labels = np.repeat(sample.labels, copies)
        labels[np.isin(labels, marks)] = IGNORE
        is_image_in = np.split(np.repeat(is_image, copies), np.cumsum(seq_lens)[:-1])
        grids_of = np.split(grids, np.cumsum(np.add.reduceat(is_image, starts, dtype=np.int64))[:-1])
        positions = [mrope_positions(taken, grid, merge) for taken, grid in zip(is_image_in, grids_of, strict=True)]
        return MultimodalSample(
            input_ids=np.repeat(sample.input_ids, copies),
            labels=labels,
            seq_lens=seq_lens,
            kinds=sample.kinds,
            loss_weights=None if sample.loss_weights is None else np.repeat(sample.loss_weights, copies),
            position_ids=np.concatenate(positions, axis=1),
            pixel_values=images["pixel_values"].astype(np.float32),
            image_grid_thw=grids,
        )

    def _inlined(self, trajectory: Trajectory) -> tuple[Trajectory, list[Any]]:
        """The trajectory as text, and the images in the order of its documents: a preference pair has each image in both."""
        kind, listed = kind_of(trajectory), trajectory.get("images") or []
        if kind in ("text", "embedding"):
            raise DataError(f"images stand in conversations, and this row is of kind '{kind}'")
        if other := [key for key in ("videos", "audios") if trajectory.get(key)]:
            raise DataError(f"the row has {' and '.join(other)}, which this template does not take: it encodes text and images")
        text: Any = {key: value for key, value in trajectory.items() if key != "images"}
        references: list[Any] = []
        for key in ("messages", "rejected_messages"):
            if key in text:
                text[key], found = inline_images(text[key], listed, "".join(IMAGE_MARKS))
                references += found
        return text, references

    def _too_long(self, num_tokens: int) -> bool:
        limit, rule = self.config.max_length, self.config.truncation
        if num_tokens > limit and rule != "delete":
            raise DataError(
                f"{num_tokens} tokens with images, which are never cut, but max_length is {limit}; raise it, make the images smaller, "
                "or set truncation to delete"
            )
        return num_tokens > limit

    def _token_id(self, text: str) -> int:
        number = self.tokenizer.convert_tokens_to_ids(text)
        if number is None or number == self.tokenizer.unk_token_id:
            raise ConfigError(f"the tokenizer in {self.folder} has no token {text!r}, so this model takes no images; use Template")
        return int(number)

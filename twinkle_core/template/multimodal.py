"""Samples with images: the value that carries them, and the pure parts of making one. Importing this imports numpy and nothing heavier."""

from __future__ import annotations

import base64
import binascii
import io
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from twinkle_core.errors import DataError
from twinkle_core.types import IGNORE, Message, Trajectory

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_PLACEHOLDER = "<image>"


@dataclass(frozen=True, kw_only=True, slots=True)
class MultimodalSample:
    """An `EncodedSample` that also carries the pixels of its images, and positions of tokens in time, height and width.

    Example: an image of 4 x 4 patches, merged 2 x 2, is 4 image tokens; after 3 tokens of text their positions are
    `[[3, 3, 3, 3], [3, 3, 4, 4], [3, 4, 3, 4]]`, and the text goes on at 5.
    """

    input_ids: np.ndarray
    """[T] int32 token ids; each image is a run of image tokens."""
    labels: np.ndarray
    """[T] int32, already shifted; never a token of an image."""
    seq_lens: np.ndarray
    """[D] int32 lengths of the documents, sum T."""
    kinds: np.ndarray
    """[D] int8 `DocumentKind`s."""
    loss_weights: np.ndarray | None = None
    """[T] float32 weight of each label's loss; None weighs all 1."""
    position_ids: np.ndarray
    """[3, T] int32 positions in time, height and width (M-RoPE, https://arxiv.org/abs/2409.12191), from 0 in each document."""
    pixel_values: np.ndarray
    """[P, C] float32: the patches of all images one after the other, C = channels x patch time x patch height x patch width."""
    image_grid_thw: np.ndarray
    """[I, 3] int64: number of patches of each image in time, height and width; the products sum to P."""

    def __post_init__(self) -> None:
        tokens, patches = len(self.input_ids), int(self.image_grid_thw.prod(axis=-1).sum())
        lengths = {len(self.labels), int(self.seq_lens.sum()), self.position_ids.shape[-1]}
        if self.loss_weights is not None:
            lengths.add(len(self.loss_weights))
        if lengths != {tokens} or len(self.kinds) != len(self.seq_lens):
            raise ValueError(f"{tokens} input ids, but labels, positions, weights or documents for {sorted(lengths)}")
        if len(self.pixel_values) != patches:
            raise ValueError(f"{len(self.pixel_values)} patches of pixels for grids of {patches}")

    @property
    def num_loss_tokens(self) -> int:
        return int((self.labels != IGNORE).sum())

    @property
    def loss_weight(self) -> float:
        """Sum of the weights of the supervised tokens; their number without weights."""
        if self.loss_weights is None:
            return float(self.num_loss_tokens)
        return float(self.loss_weights[self.labels != IGNORE].sum(dtype=np.float64))


def mrope_positions(is_image: np.ndarray, image_grid_thw: np.ndarray, merge_size: int) -> np.ndarray:
    """[3, T] int32 positions of one document, of which `is_image` [T] bool marks the image tokens, as Qwen 2 VL to Qwen 3.5 count them.

    Text counts on by one in all three. An image at position p has t = p, h = p + row, w = p + column of its merged patches; what
    follows goes on at p + the larger side. Raises `DataError` where the image tokens are not those of the grids.
    """
    positions = np.empty((3, len(is_image)), dtype=np.int32)
    token = position = 0
    for time, height, width in image_grid_thw.tolist():
        first = token + int(np.argmax(is_image[token:])) if is_image[token:].any() else len(is_image)
        rows, columns = height // merge_size, width // merge_size
        end = first + time * rows * columns
        if end > len(is_image) or not is_image[first:end].all():
            raise DataError(f"an image of {time} x {rows} x {columns} tokens does not stand whole at token {first}")
        positions[:, token:first] = np.arange(position, position + first - token)
        position += first - token
        grid = np.indices((time, rows, columns), dtype=np.int32).reshape(3, -1)
        positions[:, first:end] = grid + position
        position += max(rows, columns)
        token = end
    if is_image[token:].any():
        raise DataError(f"{int(is_image[token:].sum())} image tokens more than the {len(image_grid_thw)} images have")
    positions[:, token:] = np.arange(position, position + len(is_image) - token)
    return positions


def inline_images(messages: Sequence[Message], images: Sequence[Any], mark: str) -> tuple[list[Message], list[Any]]:
    """The messages with `mark` for each image and nothing but text around it, and the references of the images in that order.

    Where the trajectory lists `images`, each placeholder `<image>` and each image part takes the next one; without a list, image
    parts carry their own reference and `<image>` is plain text. Raises `DataError` where the numbers or references differ, and for
    parts that are neither text nor image.
    """
    references: list[Any] = []

    def text_of(text: str) -> str:
        pieces = text.split(IMAGE_PLACEHOLDER) if images else [text]
        for _ in pieces[1:]:
            take(None)
        return mark.join(pieces)

    def take(own: Any) -> str:
        if not images and own is None:
            raise DataError("an image part without a reference, in a conversation that lists no images")
        if images and len(references) == len(images):
            raise DataError(f"more image placeholders than the {len(images)} images listed")
        listed = images[len(references)] if images else own
        if own is not None and own is not listed and own != listed:
            raise DataError(f"image {len(references) + 1} is {str(own)[:80]!r} in its message, but {str(listed)[:80]!r} in the list")
        references.append(listed)
        return mark

    changed: list[Message] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            content = text_of(content)
        elif isinstance(content, list):
            content = "".join(take(_reference(part)) if _is_image(part) else text_of(_text(part)) for part in content)
        changed.append({**message, "content": content})
    if len(references) != len(images or references):
        raise DataError(f"{len(images)} images are listed, but the messages have {len(references)} placeholders {IMAGE_PLACEHOLDER}")
    return changed, references


def has_images(trajectory: Trajectory) -> bool:
    """Whether images are listed, or stand as parts in a message."""
    messages = [*trajectory["messages"], *trajectory.get("rejected_messages", ())]
    contents = [message.get("content") for message in messages]
    return bool(trajectory.get("images")) or any(_is_image(part) for content in contents if isinstance(content, list) for part in content)


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def _reference(part: Mapping[str, Any]) -> Any:
    reference = part.get("image", part.get("image_url", part.get("url", part.get("path"))))
    return reference.get("url") if isinstance(reference, Mapping) and "url" in reference else reference


def _text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise DataError(f"a content part of type {kind!r} is neither text nor image")


def load_image(reference: Any, root: Path | None = None) -> Image:
    """The image in RGB, turned as its EXIF tag says. Nothing is fetched from the network.

    reference: a path, the bytes of an image file, a data URI, a PIL image, or `{'bytes': …, 'path': …}` as the datasets library
    stores images. root: the folder that relative paths start from and that no path may leave; None takes any path of this machine.
    Raises `DataError` for everything else, and for bytes that are no image.
    """
    from PIL import Image, ImageOps

    if isinstance(reference, Mapping):
        reference = reference["bytes"] if reference.get("bytes") is not None else reference.get("path")
    try:
        image = reference if isinstance(reference, Image.Image) else Image.open(_source(reference, root))
        return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, ValueError, SyntaxError, struct.error, Image.DecompressionBombError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"cannot read the image {_shown(reference)}: {error}") from error


def _source(reference: Any, root: Path | None) -> Path | io.BytesIO:
    if isinstance(reference, (bytes, bytearray, memoryview)):
        return io.BytesIO(reference)
    if isinstance(reference, str) and reference.startswith("data:"):
        head, _, body = reference.partition(",")
        if not head.endswith(";base64"):
            raise DataError(f"the image {_shown(reference)} is a data URI that is not base64")
        try:
            return io.BytesIO(base64.b64decode(body, validate=True))
        except binascii.Error as error:
            raise DataError(f"the image {_shown(reference)} is no valid base64: {error}") from None
    if isinstance(reference, str) and "://" in reference:
        raise DataError(f"the image {_shown(reference)} is an address, and nothing is fetched here: download it and give its path")
    if not isinstance(reference, (str, Path)):
        raise DataError(f"an image is a path, bytes, a data URI or a PIL image, got {type(reference).__name__}")
    path = Path(reference) if root is None else root / reference
    if root is not None and not path.resolve().is_relative_to(root.resolve()):
        raise DataError(f"the image {_shown(reference)} lies outside {root}")
    return path


def _shown(reference: Any) -> str:
    return repr(reference[:80]) if isinstance(reference, str) else repr(reference) if isinstance(reference, Path) else "given as bytes"

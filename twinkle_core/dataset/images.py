"""Images in rows: as PIL images, as the bytes and paths that a file of rows can hold, and as pixels in samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

from twinkle_core.errors import DataError
from twinkle_core.types import Trajectory

if TYPE_CHECKING:
    from twinkle_core.template import Encoder, Outcome, Template
    from twinkle_core.template.qwen3_5 import Qwen3_5Template

Row = dict[str, Any]


def encoder_of(template: Template) -> Encoder | ImageEncoder:
    """What encodes rows of any kind that the template takes."""
    from twinkle_core.template.qwen3_5 import Qwen3_5Template

    return ImageEncoder(template) if isinstance(template, Qwen3_5Template) else template.encoder()


@dataclass(frozen=True)
class ImageEncoder:
    """As `Encoder`, but rows with images are encoded too, one by one: their samples are `MultimodalSample`s."""

    template: Qwen3_5Template

    def outcomes(self, trajectories: Sequence[Trajectory]) -> list[Outcome]:
        """As `Encoder.outcomes`."""
        from twinkle_core.template.multimodal import has_images

        if not any(has_images(trajectory) for trajectory in trajectories):
            return self.template.encoder().outcomes(trajectories)
        if len(trajectories) == 1:
            return [self._with_images(trajectories[0])]
        return [outcome for trajectory in trajectories for outcome in self.outcomes([trajectory])]

    def _with_images(self, trajectory: Trajectory) -> Outcome:
        from twinkle_core.template import Outcome

        if self.template.config.on_bad_row != "skip":
            samples: tuple[Any, ...] = tuple(self.template.batch_encode([trajectory]))
            num_tokens = sum(len(sample.input_ids) for sample in samples)
            return Outcome(samples=samples, dropped=None if samples else "too_long", num_tokens=num_tokens)
        try:
            sample: Any = self.template.encode(trajectory)
        except DataError as error:
            return Outcome(refused=str(error))
        return Outcome(samples=(sample,), num_tokens=len(sample.input_ids))


def cast_image(column: str, decode: bool) -> Callable[[Row], Row]:
    """A function of a row that changes the images of `column`; null stays null. It raises `DataError` for a row without the column."""
    from twinkle_core.template.multimodal import load_image

    cast = load_image if decode else _as_bytes

    def function(row: Row) -> Row:
        if column not in row:
            raise DataError(f"there is no column {column!r}; the row has {sorted(row)}")
        value = row[column]
        changed = [cast(item) for item in value] if isinstance(value, list) else None if value is None else cast(value)
        return {**row, column: changed}

    return function


def _as_bytes(image: Any) -> Any:
    from PIL.Image import Image

    if not isinstance(image, Image):
        return image
    target = BytesIO()
    image.save(target, format="PNG")
    return {"bytes": target.getvalue(), "path": None}

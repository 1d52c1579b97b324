"""Images, videos and audios of a row: references kept beside the messages, one for each placeholder or part.

A placeholder is `<image>`, `<video>` or `<audio>` in a text. It is one only in a row that has references: in a row
without any, `<video>` is a word of HTML.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Any

from twinkle_core.errors import DataError
from twinkle_core.preprocessor.fields import Row, short
from twinkle_core.types import Message, Trajectory

MEDIA = ("images", "videos", "audios")
ROW_KEYS = frozenset({*MEDIA, *(key[:-1] for key in MEDIA)})
"""Keys of a row that hold references: a list of them, or one."""
PART_TYPES = {
    "image": "images", "image_url": "images",
    "video": "videos", "video_url": "videos",
    "audio": "audios", "audio_url": "audios", "input_audio": "audios",
}  # fmt: skip
"""Type of a content part → the key of the trajectory that holds its reference."""
_SIGNATURES = ((b"\x89PNG", "image/png"), (b"\xff\xd8\xff", "image/jpeg"), (b"GIF8", "image/gif"), (b"RIFF", "image/webp"))

References = dict[str, list[Any]]
"""Media key → what the parts met so far refer to, None for a part without a reference of its own."""


def media_part(part: dict[str, Any], found: References) -> dict[str, Any]:
    """The part as it stays in the message, e.g. {'type': 'image'}; its reference is added to `found`."""
    key = PART_TYPES[part["type"]]
    held = next((part[name] for name in (part["type"], "url", "path", "value") if part.get(name) is not None), None)
    found.setdefault(key, []).append(None if held is None else _reference(held))
    return {"type": key[:-1]}


def attach_media(trajectory: Trajectory, row: Row, found: References) -> None:
    """Puts the references of the row's keys and of its parts into the trajectory.

    Raises `DataError` when their number is not that of the placeholders and parts, or when both places name different ones.
    """
    if not found and row.keys().isdisjoint(ROW_KEYS):
        return
    for key in MEDIA:
        parts = found.get(key, [])
        given = _given(row, key)
        if given is None and not parts:
            continue
        inline = [reference for reference in parts if reference is not None]
        if inline and len(inline) != len(parts):
            raise DataError(f"{len(parts) - len(inline)} of {len(parts)} {key[:-1]} parts have no reference of their own")
        if inline and given and inline != given:
            raise DataError(f"the {key[:-1]} parts and '{key}' refer to different things; give the references once")
        references = inline or given or []
        conversations = [trajectory["messages"], trajectory.get("rejected_messages", trajectory["messages"])]
        for messages in conversations:
            needed = _count(messages, key)
            if needed != len(references):
                raise DataError(f"{needed} placeholders <{key[:-1]}> or {key[:-1]} parts, but {len(references)} references in '{key}'")
        if references:
            trajectory[key] = references  # type: ignore[literal-required]


def refuse_media(row: Row, layout: str) -> None:
    """Raises `DataError` for references in a row whose layout has no place for them."""
    for key in MEDIA:
        if _given(row, key):
            raise DataError(f"'{key}' in a row of layout '{layout}', which takes text only")


def _given(row: Row, key: str) -> list[Any] | None:
    name = key if row.get(key) is not None else key[:-1]
    value = row.get(name)
    if value is None:
        return None
    return [_reference(item) for item in (value if isinstance(value, list) else [value])]


def _count(messages: Iterable[Message], key: str) -> int:
    mark, kind, total = f"<{key[:-1]}>", key[:-1], 0
    for message in messages:
        content = message["content"]
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            total += part["text"].count(mark) if part["type"] == "text" else part["type"] == kind
    return total


def _reference(value: Any) -> str:
    """A path, URL or data URI. The forms of OpenAI ({'url': …}) and of datasets ({'bytes': …, 'path': …}) are read too."""
    if isinstance(value, str) and value:
        return value
    if isinstance(value, bytes):
        return _data_uri(value)
    if isinstance(value, dict):
        if isinstance(value.get("bytes"), bytes):
            return _data_uri(value["bytes"])
        if isinstance(value.get("data"), str) and isinstance(value.get("format"), str):
            return f"data:audio/{value['format']};base64,{value['data']}"
        for key in ("url", "path"):
            if isinstance(value.get(key), str) and value[key]:
                return str(value[key])
    raise DataError(f"a reference to an image, video or audio is a path, a URL, a data URI or bytes, got {short(value)}")


def _data_uri(data: bytes) -> str:
    kind = next((name for start, name in _SIGNATURES if data.startswith(start)), "application/octet-stream")
    return f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"

"""Where rows come from: files, objects in a store, reasoning_gym's generators, and the built-in self-cognition set.

A source has a digest of its content, which enters the preprocess stage's key, and rows with their place in the source.
Lines are UTF-8 and end at LF only: U+2028 or a form feed inside a string does not end a record.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, Protocol
from urllib.parse import parse_qsl

from storage.fingerprint import digest_file, fingerprint
from storage.store import open_store
from twinkle_core.config import SourceConfig
from twinkle_core.errors import ConfigError, DataError

BOM = b"\xef\xbb\xbf"
SELF_COGNITION = Path(__file__).parent / "data" / "self_cognition.jsonl"

OnBadRow = Callable[[int, str], None]
"""Called with the line (or row) number and the reason; it raises, or counts and returns."""


class Source(Protocol):
    """Rows of one source, in a fixed order."""

    @property
    def place(self) -> str:
        """What the row number counts: 'line' of a JSONL file, 'row' of a list or generator; both from 1."""
        ...

    def digest(self) -> str:
        """Hex digest of the content: the same rows have the same digest wherever they lie."""
        ...

    def rows(self, on_bad_row: OnBadRow | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
        """(number, row) pairs. A bad row goes to `on_bad_row`, which is to raise `DataError` when absent."""
        ...


def open_source(config: SourceConfig) -> Source:
    """The source behind `config.uri`. Raises `ConfigError` for an unknown scheme or file type."""
    scheme, separator, rest = config.uri.partition("://")
    if not separator:
        return FileSource(config.name, _LocalBytes(Path(config.uri)))
    if scheme == "file":
        return FileSource(config.name, _LocalBytes(Path(rest)))
    if scheme in ("s3", "memory"):
        prefix, _, key = config.uri.rpartition("/")
        return FileSource(config.name, _StoredBytes(prefix, key))
    if scheme == "builtin" and rest == "self_cognition":
        return FileSource(config.name, _LocalBytes(SELF_COGNITION))
    if scheme == "reasoning_gym":
        return ReasoningGymSource.parse(config.uri)
    raise ConfigError(
        f"source '{config.name}': uri {config.uri!r} is not known; use a .jsonl or .json file, s3://bucket/key, "
        "reasoning_gym://NAME?size=…&seed=…, or builtin://self_cognition"
    )


class _Bytes(Protocol):
    name: str

    def open(self) -> AbstractContextManager[BinaryIO]: ...

    def digest(self) -> str: ...


class _LocalBytes:
    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.name

    def open(self) -> BinaryIO:
        try:
            return self.path.open("rb")
        except OSError as error:
            raise DataError(f"cannot read source file {self.path}: {error.strerror}; give the path of a .jsonl or .json file") from error

    def digest(self) -> str:
        self.open().close()
        return digest_file(self.path)


class _StoredBytes:
    def __init__(self, prefix: str, key: str) -> None:
        self.prefix, self.name = prefix, key

    def open(self) -> BinaryIO:
        return open_store(self.prefix).open(self.name)

    def digest(self) -> str:
        digest = hashlib.sha256()
        with self.open() as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
        return digest.hexdigest()


class FileSource:
    """A .jsonl file (one object a line) or a .json file (one list of objects)."""

    def __init__(self, name: str, content: _Bytes) -> None:
        self.name, self.content = name, content
        suffix = Path(content.name).suffix.lower()
        if suffix not in (".jsonl", ".json"):
            raise ConfigError(f"source '{name}': {content.name!r} must end in .jsonl (one object a line) or .json (a list of objects)")
        self.place = "line" if suffix == ".jsonl" else "row"

    def digest(self) -> str:
        return self.content.digest()

    def rows(self, on_bad_row: OnBadRow | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
        """Rows as `Source` says. Raises `DataError` when there are none at all."""
        refuse = on_bad_row or self._raise
        found = False
        for number, value in self._lines(refuse) if self.place == "line" else self._items():
            found = True
            reason = row_problem(value)
            if reason is None:
                yield number, value
            else:
                refuse(number, reason)
        if not found:
            raise DataError(f"source '{self.name}': no rows in {self.content.name}; it is empty or holds only blank or refused lines")

    def _raise(self, number: int, reason: str) -> None:
        raise DataError(f"source '{self.name}', {self.content.name}, {self.place} {number}: {reason}")

    def _lines(self, refuse: OnBadRow) -> Iterator[tuple[int, Any]]:
        offset = 0
        with self.content.open() as stream:
            for number, line in enumerate(stream, start=1):
                start, offset = offset, offset + len(line)
                if number == 1 and line.startswith(BOM):
                    start, line = len(BOM), line[len(BOM) :]
                if not line.strip():
                    continue
                try:
                    value = parse_json(line, start)
                except DataError as error:
                    refuse(number, str(error))
                    continue
                yield number, value

    def _items(self) -> Iterator[tuple[int, Any]]:
        with self.content.open() as stream:
            data = stream.read()
        start = len(BOM) if data.startswith(BOM) else 0
        try:
            value = parse_json(data[start:], start) if data[start:].strip() else []
        except DataError as error:
            raise DataError(f"source '{self.name}', {self.content.name}: {error}") from None
        if not isinstance(value, list):
            raise DataError(
                f"source '{self.name}', {self.content.name}: a .json file holds one list of objects, got {type(value).__name__}; "
                "name the file .jsonl when it has one object a line"
            )
        yield from enumerate(value, start=1)


def parse_json(data: bytes, offset: int = 0) -> Any:
    """The JSON value of UTF-8 `data`, which starts at byte `offset` of its file. Integers keep all their digits; NaN is refused."""
    if data.startswith(BOM):
        raise DataError("a byte order mark in the middle of the file (two files glued together?); remove it")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        wrong = f"byte 0x{data[error.start]:02x} at byte offset {offset + error.start}"
        raise DataError(f"not UTF-8: {wrong}; convert the file to UTF-8") from None
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise DataError(f"not valid JSON: {error}") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def row_problem(row: Any) -> str | None:
    """Why `row` cannot be used at all, or None."""
    if not isinstance(row, dict):
        return f"a row is an object, got {type(row).__name__}"
    try:
        json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        return f"half of a surrogate pair (U+{ord(error.object[error.start]):04X}) in a string; no tokenizer can read it"
    except RecursionError:
        return "nested too deeply"
    return None


_NUMBER = re.compile(r"[-+]?\d[\d,]*(\.\d+)?")


@dataclass(frozen=True, kw_only=True)
class ReasoningGymSource:
    """Generated questions with checkable answers (https://github.com/open-thought/reasoning-gym)."""

    dataset: str
    size: int
    seed: int
    settings: dict[str, int | float | bool | str]
    """Further settings of the generator, e.g. `max_terms`; checked against the fields of its own config."""
    place: str = "row"

    @classmethod
    def parse(cls, uri: str) -> ReasoningGymSource:
        """From 'reasoning_gym://NAME?size=N&seed=S&max_terms=3'. `size` is required; `seed` is 0 when left out."""
        dataset, _, query = uri.removeprefix("reasoning_gym://").partition("?")
        pairs = parse_qsl(query, keep_blank_values=True)
        settings = {name: _scalar(text) for name, text in pairs}
        if len(settings) != len(pairs):
            raise ConfigError(f"{uri!r} names a setting twice")
        size, seed = settings.pop("size", None), settings.pop("seed", 0)
        if type(size) is not int or size < 1 or type(seed) is not int or seed < 0 or not dataset.isidentifier():
            raise ConfigError(f"{uri!r} must read reasoning_gym://NAME?size=N&seed=S with N at least 1 and S at least 0")
        source = cls(dataset=dataset, size=size, seed=seed, settings=settings)
        known = source._known_settings()
        if unknown := sorted(set(settings) - set(known)):
            raise ConfigError(f"{uri!r}: unknown setting {unknown[0]!r}; {source.dataset} knows {', '.join(known)}")
        return source

    def _known_settings(self) -> list[str]:
        from reasoning_gym.factory import DATASETS  # type: ignore[import-untyped]

        if self.dataset not in DATASETS:
            raise ConfigError(f"reasoning_gym has no dataset {self.dataset!r}; it has {', '.join(sorted(DATASETS))}")
        return [field.name for field in fields(DATASETS[self.dataset][1]) if field.name not in ("size", "seed")]

    def digest(self) -> str:
        """Name, settings and version of the generator: together they determine every row."""
        from importlib.metadata import version

        recipe = {"dataset": self.dataset, "size": self.size, "seed": self.seed, "settings": self.settings}
        return fingerprint({"generator": "reasoning_gym", "version": version("reasoning_gym"), **recipe})

    def rows(self, on_bad_row: OnBadRow | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
        """Rows in messages form, scored by 'last_number' where the answer is a number and by 'exact' otherwise."""
        import reasoning_gym  # type: ignore[import-untyped]

        refuse = on_bad_row or self._raise
        try:
            entries = reasoning_gym.create_dataset(self.dataset, size=self.size, seed=self.seed, **self.settings)
        except (AssertionError, TypeError, ValueError) as error:
            raise ConfigError(f"reasoning_gym refuses the settings {self.settings} of {self.dataset}: {error}") from error
        for number in range(1, self.size + 1):
            entry = entries[number - 1]
            answer = entry["answer"]
            if not isinstance(answer, str) or not answer.strip():
                refuse(number, f"the generator gives no single answer (got {answer!r}), so there is nothing to learn")
                continue
            messages = [{"role": "user", "content": entry["question"]}, {"role": "assistant", "content": answer}]
            scorer = "last_number" if _NUMBER.fullmatch(answer.strip()) else "exact"
            yield number, {"messages": messages, "user_data": [["scorer", scorer], ["answer", answer]]}

    def _raise(self, number: int, reason: str) -> None:
        raise DataError(f"reasoning_gym {self.dataset}, row {number}: {reason}")


def _scalar(text: str) -> int | float | bool | str:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text

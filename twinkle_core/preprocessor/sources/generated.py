"""Rows that reasoning_gym's generators make."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from urllib.parse import parse_qsl

from storage.fingerprint import fingerprint
from twinkle_core.errors import ConfigError
from twinkle_core.preprocessor.sources.place import OnBadRow, Place, Row, raising

_NUMBER = re.compile(r"[-+]?\d[\d,]*(\.\d+)?")


@dataclass(frozen=True, kw_only=True)
class ReasoningGymSource:
    """Generated questions with checkable answers (https://github.com/open-thought/reasoning-gym)."""

    dataset: str
    size: int
    seed: int
    settings: dict[str, int | float | bool | str]
    """Further settings of the generator, e.g. `max_terms`; checked against the fields of its own config."""

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

    def rows(self, on_bad_row: OnBadRow | None = None) -> Iterator[tuple[Place, Row]]:
        """Rows in messages form, scored by 'last_number' where the answer is a number and by 'exact' otherwise."""
        import reasoning_gym  # type: ignore[import-untyped]

        refuse = on_bad_row or raising(f"reasoning_gym {self.dataset}")
        try:
            entries = reasoning_gym.create_dataset(self.dataset, size=self.size, seed=self.seed, **self.settings)
        except (AssertionError, TypeError, ValueError) as error:
            raise ConfigError(f"reasoning_gym refuses the settings {self.settings} of {self.dataset}: {error}") from error
        for number in range(1, self.size + 1):
            entry = entries[number - 1]
            place, answer = Place(None, "row", number), entry["answer"]
            if not isinstance(answer, str) or not answer.strip():
                refuse(place, f"the generator gives no single answer (got {answer!r}), so there is nothing to learn")
                continue
            messages = [{"role": "user", "content": entry["question"]}, {"role": "assistant", "content": answer}]
            scorer = "last_number" if _NUMBER.fullmatch(answer.strip()) else "exact"
            yield place, {"messages": messages, "user_data": [["scorer", scorer], ["answer", answer]]}


def _scalar(text: str) -> int | float | bool | str:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text

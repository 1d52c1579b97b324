"""Personal data in texts, found by presidio-analyzer's patterns (https://microsoft.github.io/presidio): no language model is used."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

from twinkle_core.errors import ConfigError
from twinkle_core.preprocessor.base import DataFilter
from twinkle_core.preprocessor.texts import all_text
from twinkle_core.types import Trajectory

RECOGNIZERS = {
    "EMAIL_ADDRESS": "EmailRecognizer",
    "PHONE_NUMBER": "PhoneRecognizer",
    "CREDIT_CARD": "CreditCardRecognizer",
    "IBAN_CODE": "IbanRecognizer",
    "IP_ADDRESS": "IpRecognizer",
    "URL": "UrlRecognizer",
}
"""Kind of personal data → presidio's recognizer of it."""
DEFAULT_ENTITIES = ("EMAIL_ADDRESS", "PHONE_NUMBER", "CREDIT_CARD", "IBAN_CODE", "IP_ADDRESS")


class PIIFilter(DataFilter):
    """Leaves out trajectories with personal data, or puts '<EMAIL_ADDRESS>' and the like in its place (action 'redact').

    What is found is what has the form of an e-mail address, phone number (of the countries presidio knows by default),
    credit card, IBAN, IP address or URL, check digits included. Names and addresses of people are not found.
    """

    def __init__(
        self,
        action: Literal["drop", "redact"] = "drop",
        entities: Sequence[str] | str = DEFAULT_ENTITIES,
        min_score: float = 0.4,
    ) -> None:
        self.entities = (entities,) if isinstance(entities, str) else tuple(entities)
        if action not in ("drop", "redact"):
            raise ConfigError(f"PIIFilter: action {action!r} is neither drop nor redact")
        if unknown := set(self.entities) - RECOGNIZERS.keys() or not self.entities:
            raise ConfigError(f"PIIFilter: entities {unknown} are unknown or none; known: {', '.join(RECOGNIZERS)}")
        self.action, self.min_score = action, min_score
        _presidio()

    def __call__(self, trajectory: Trajectory) -> bool:
        return not self.spans(all_text(trajectory, calls=True))

    def apply(self, trajectory: Trajectory) -> Trajectory | None:
        if self.action == "drop":
            return trajectory if self(trajectory) else None
        kept: Any = {key: value if key in ("user_data", "tools", "images", "videos", "audios") else self._redacted(value)
                     for key, value in trajectory.items()}  # fmt: skip
        redacted: Trajectory = kept
        return redacted

    def spans(self, text: str) -> list[tuple[int, int, str]]:
        """(start, end, entity) of what is found, in order, without overlaps; of two that overlap the surer, then longer one."""
        found = [
            result
            for entity in self.entities
            for result in _recognizer(entity).analyze(text, [entity], None) or ()
            if result.score >= self.min_score
        ]
        found.sort(key=lambda result: (-result.score, result.start - result.end, result.start, result.entity_type))
        spans: list[tuple[int, int, str]] = []
        for result in found:
            if all(result.end <= start or end <= result.start for start, end, _ in spans):
                spans.append((result.start, result.end, result.entity_type))
        return sorted(spans)

    def redact(self, text: str) -> str:
        """The text with each find replaced by its entity's name in angle brackets."""
        for start, end, entity in reversed(self.spans(text)):
            text = f"{text[:start]}<{entity}>{text[end:]}"
        return text

    def _redacted(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.redact(value)
        if isinstance(value, list):
            return [self._redacted(item) for item in value]
        if isinstance(value, dict):
            fixed = ("role", "type", "id", "tool_call_id", "name")
            return {key: item if key in fixed else self._redacted(item) for key, item in value.items()}
        return value


@lru_cache(maxsize=16)
def _recognizer(entity: str) -> Any:
    presidio = _presidio()
    if entity != "EMAIL_ADDRESS":
        return getattr(presidio, RECOGNIZERS[entity])()
    import tldextract

    domains = tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)

    class OfflineEmailRecognizer(presidio.EmailRecognizer):  # type: ignore[misc, name-defined]
        """presidio's own fetches the list of domain endings from the internet; this one takes the list that tldextract brings."""

        def validate_result(self, pattern_text: str) -> bool:
            return bool(domains(pattern_text).fqdn)

    return OfflineEmailRecognizer()


def _presidio() -> Any:
    try:
        from presidio_analyzer import predefined_recognizers
    except ImportError:
        raise ConfigError("PIIFilter needs presidio-analyzer: pip install twinkle-flows[pii]") from None
    return predefined_recognizers

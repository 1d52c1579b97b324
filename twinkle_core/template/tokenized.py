"""Texts -> token ids, and which of them a stretch of characters gave."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

CACHED_HEADS = 512


@dataclass(frozen=True, slots=True)
class Tokenized:
    """The tokens of one text.

    Example: of "x🙂y" in byte-level tokens, one for each byte: starts [0, 1, 2, 3, 4, 5], ends [1, 2, 3, 4, 5, 6], and the emoji,
    `between(1, 2)`, is slice(1, 5).
    """

    ids: np.ndarray
    """[T] int32."""
    starts: np.ndarray
    """[T] where each token starts in the text: bytes of UTF-8, or characters."""
    ends: np.ndarray
    """[T] where it ends; neither falls."""
    places: np.ndarray | None
    """[C + 1] start of each character, and the end, in those units; None where they are the characters' numbers."""

    def between(self, start: int, end: int) -> slice:
        """All tokens that share a character with the characters from `start` to before `end`."""
        if self.places is not None:
            start, end = int(self.places[start]), int(self.places[end])
        if start >= end:
            return slice(0, 0)
        return slice(int(self.ends.searchsorted(start, "right")), int(self.starts.searchsorted(end, "left")))


class TextTokenizer:
    """A Rust tokenizer that puts no token of its own around a text. Pickles.

    The tokens of a byte-level tokenizer are the bytes of the text, cut up, so their lengths tell where each stands, and the tokenizer
    need not trace that: a third faster. Where the lengths do not add up to the text (an added token took the blanks beside it), and for
    other tokenizers, the tokenizer is asked. The start that conversations share (system message, tools) is tokenized once.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._normalizer = tokenizer.normalizer
        self._num_bytes = bytes_of_tokens(tokenizer)
        self._added = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
        self._heads: dict[str, tuple[int, list[int]]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return TextTokenizer, (self._tokenizer,)

    def __call__(self, texts: Sequence[str], heads: Sequence[int] | None = None) -> list[Tokenized | None]:
        """The tokens of each text; None for one that is no Unicode (it has half of a surrogate pair).

        `heads` may say how many characters at the start of each are also the start of others.
        """
        if not texts:
            return []
        try:
            return self._by_lengths(texts, heads or [0] * len(texts)) if self._num_bytes is not None else self._by_offsets(texts)
        except (UnicodeEncodeError, TypeError):
            return [None] if len(texts) == 1 else [tokenized for text in texts for tokenized in self([text])]

    def _by_lengths(self, texts: Sequence[str], heads: Sequence[int]) -> list[Tokenized | None]:
        known = [self._head(text[:head]) for text, head in zip(texts, heads, strict=True)]
        rest = [text[length:] for text, (length, _) in zip(texts, known, strict=True)]
        encodings = self._tokenizer.encode_batch_fast(rest, add_special_tokens=False)
        found = [before + encoding.ids for (_, before), encoding in zip(known, encodings, strict=True)]
        ids = np.fromiter(chain.from_iterable(found), dtype=np.int32)
        ends = np.concatenate([[0], np.cumsum(self._num_bytes[ids])])  # type: ignore[index]
        made: list[Tokenized | None] = []
        first = 0
        for text, last in zip(texts, np.cumsum([len(own) for own in found]).tolist(), strict=True):
            places = None if text.isascii() else _byte_places(text)
            bounds = ends[first : last + 1] - ends[first]
            as_it_is = places is None or self._normalizer is None or self._normalizer.normalize_str(text) == text
            if as_it_is and bounds[-1] == (len(text) if places is None else places[-1]):
                made.append(Tokenized(ids[first:last], bounds[:-1], bounds[1:], places))
            else:
                made += self._by_offsets([text])
            first = last
        return made

    def _head(self, text: str) -> tuple[int, list[int]]:
        """How much of the start of a text has the same tokens whatever follows, and these: up to its last added token."""
        found = self._heads.get(text)
        if found is None:
            if len(self._heads) >= CACHED_HEADS:
                self._heads.clear()  # another thread may do so too: nothing is looked up twice
            found = self._heads[text] = self._cut(text)
        return found

    def _cut(self, text: str) -> tuple[int, list[int]]:
        """An added token is looked for before anything else, and parts the text, unless it, or one after it, looks at its neighbours."""
        parting = [
            content
            for content, token in self._added.items()
            if content in text
            and not (token.normalized or token.lstrip or token.rstrip or token.single_word)
            and not (content[-1].isalnum() or content[-1] == "_")
        ]
        start, last = max(((text.rfind(content), content) for content in parting), default=(-1, ""))
        head = text[: start + len(last)] if parting else ""
        longer = any(head.endswith(content[:length]) for content in self._added for length in range(1, len(content)))
        if not head or longer:
            return 0, []
        ids = self._tokenizer.encode(head, add_special_tokens=False).ids
        return (len(head), ids) if ids[-1] == self._tokenizer.token_to_id(last) else (0, [])

    def _by_offsets(self, texts: Sequence[str]) -> list[Tokenized | None]:
        made: list[Tokenized | None] = []
        for encoding in self._tokenizer.encode_batch(list(texts), add_special_tokens=False):
            offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
            made.append(Tokenized(np.array(encoding.ids, dtype=np.int32), offsets[:, 0], offsets[:, 1], None))
        return made


def _byte_places(text: str) -> np.ndarray:
    """[C + 1] int64: where each character starts in the UTF-8 of the text, and its end."""
    code = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    return np.concatenate([[0], np.cumsum(1 + (code >= 0x80) + (code >= 0x800) + (code >= 0x10000))])


def bytes_of_tokens(tokenizer: Tokenizer) -> np.ndarray | None:
    """[V] int64 number of bytes of UTF-8 that each token stands for; None where the tokens of a text are not its bytes, cut up.

    They are for a BPE over bytes (GPT-2's, https://github.com/openai/gpt-2/blob/master/src/encoder.py: each byte is one character of a
    token) whose pre-tokenizer neither adds nor takes away, without a normalizer other than NFC, which leaves ASCII as it is.
    No token stands for fewer bytes than is said here, else two errors could cancel out and a wrong sum look right. It may be more: an
    added token can take blanks beside it, and bytes that the vocabulary lacks have no token.
    """
    model = tokenizer.model
    if not isinstance(model, BPE) or not _cuts_bytes_up(tokenizer):
        return None
    if model.unk_token or model.continuing_subword_prefix or model.end_of_word_suffix or model.byte_fallback:
        return None
    vocabulary, added = tokenizer.get_vocab(with_added_tokens=False), tokenizer.get_added_tokens_decoder()
    num_bytes = np.zeros(1 + max([*vocabulary.values(), *added], default=-1), dtype=np.int64)
    num_bytes[list(vocabulary.values())] = [len(token) for token in vocabulary]
    alphabet = set(ByteLevel.alphabet())
    for number, token in added.items():
        content = token.content
        if content in vocabulary and not content.isascii() and alphabet.issuperset(content):
            return None  # stands for itself where it is written, and for other bytes where merges give it
        if token.normalized and tokenizer.normalizer is not None:
            content = tokenizer.normalizer.normalize_str(content)
        num_bytes[number] = len(content.encode())
    return num_bytes


def _cuts_bytes_up(tokenizer: Tokenizer) -> bool:
    """Whether what the BPE is given are the bytes of the text (of its NFC form, if it has another), each as one character, once."""
    before, normalizer = _form(tokenizer.pre_tokenizer), _form(tokenizer.normalizer)
    *cuts, last = before.get("pretokenizers", [before]) or [{}]
    return (
        last.get("type") == "ByteLevel"
        and not last["add_prefix_space"]
        and all((cut["type"] == "Split" and cut["behavior"] != "Removed") or cut["type"] == "Digits" for cut in cuts)
        and all(one["type"] == "NFC" for one in normalizer.get("normalizers", [normalizer]) if one)
    )


def _form(step: Any) -> dict[str, Any]:
    """A step of the tokenizer as in tokenizer.json; {} for None."""
    return {} if step is None else dict(json.loads(step.__getstate__()))

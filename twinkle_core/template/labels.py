"""Tokens and what is learnt of them -> `EncodedSample`s. Pure: arrays in, values out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from twinkle_core.errors import DataError
from twinkle_core.template.outcome import Outcome
from twinkle_core.template.tokenized import Tokenized
from twinkle_core.types import IGNORE, DocumentKind, EncodedSample

Rule = Literal["raise", "delete", "left", "right", "split"]


@dataclass(frozen=True, slots=True)
class Tokens:
    """One document."""

    ids: np.ndarray
    """[T] int32."""
    weights: np.ndarray
    """[T] float32 weight of each token in the loss, not shifted."""
    kind: DocumentKind
    weighted: bool = False
    """Some weight may be neither 0 nor 1."""


def token_weights(tokenized: Tokenized, spans: Sequence[tuple[int, int, float]], base: float) -> np.ndarray:
    """Float32 [T]: the weight of the span that a token shares a character with (of the last such span), else `base`.

    Whole tokens, and all tokens of a character: the tokenizer's own mask stops at the first, and so loses the end of an emoji.
    """
    weights = np.full(len(tokenized.ids), base, dtype=np.float32) if base else np.zeros(len(tokenized.ids), dtype=np.float32)
    for start, end, weight in spans:
        weights[tokenized.between(start, end)] = weight
    return weights


def outcome(documents: Sequence[Tokens], rule: Rule, max_length: int, unprinted_tools: bool) -> Outcome:
    """What becomes of one trajectory's documents under a truncation rule.

    'left' keeps the end of each document, 'right' its start. 'split' cuts a conversation or a text into pieces; a piece without a
    supervised token is left out, and its tokens are counted as truncated. Documents that cannot be split (prompts, judged
    conversations, and those that belong together) are dropped instead.

    Raises `DataError` where a document is too long under 'raise', and where no supervised token is left (under 'delete' it is dropped).
    """
    num_tokens = sum(len(document.ids) for document in documents)
    longest = max(len(document.ids) for document in documents)
    if longest > max_length:
        if rule == "raise":
            raise DataError(
                f"{longest} tokens, but max_length is {max_length}; raise it, or set truncation to delete, left, right or split"
            )
        splits = rule == "split" and len(documents) == 1 and documents[0].kind == DocumentKind.PLAIN
        if rule == "delete" or (rule == "split" and not splits):
            return Outcome(dropped="too_long", num_tokens=num_tokens, unprinted_tools=unprinted_tools)
        pieces = [[piece] for piece in _split(documents[0], max_length)] if splits else [[_cut(d, rule, max_length) for d in documents]]
    else:
        pieces = [list(documents)]
    samples = tuple(_sample(piece) for piece in pieces if _learns(piece))
    if not samples:
        if rule == "delete":
            return Outcome(dropped="no_loss", num_tokens=num_tokens, unprinted_tools=unprinted_tools)
        kept = sum(len(document.ids) for piece in pieces for document in piece)
        cut = f" after truncation '{rule}' from {num_tokens} to {kept} tokens" if num_tokens > kept else ""
        why = "; the chat template prints none of its tool calls, and turns with such are not learnt" if unprinted_tools and not cut else ""
        raise DataError(f"no supervised token is left{cut}: nothing to learn{why}; raise max_length, or set truncation to delete")
    kept = num_tokens if longest <= max_length else sum(len(sample.input_ids) for sample in samples)
    return Outcome(samples=samples, num_tokens=num_tokens, truncated_tokens=num_tokens - kept, unprinted_tools=unprinted_tools)


_LEARNT = frozenset({DocumentKind.PLAIN, DocumentKind.CHOSEN, DocumentKind.REJECTED, DocumentKind.DESIRABLE, DocumentKind.UNDESIRABLE})


def _learns(documents: Sequence[Tokens]) -> bool:
    """Every document that is to be learnt has a supervised token; prompts and embeddings need none."""
    return all(document.kind not in _LEARNT or np.count_nonzero(document.weights[1:]) for document in documents)


def _cut(document: Tokens, rule: Rule, limit: int) -> Tokens:
    kept = slice(-limit, None) if rule == "left" else slice(0, limit)
    return replace(document, ids=document.ids[kept], weights=document.weights[kept])


def _split(document: Tokens, limit: int) -> list[Tokens]:
    """Pieces of at most `limit` tokens. A single last token that is to be learnt gets the one before it, which predicts it.

    One that is not stays alone: the token before it may be a stop token, which then is learnt in the piece before.
    """
    total = len(document.ids)
    cuts = [*range(0, total, limit), total]
    if cuts[-1] - cuts[-2] == 1 and limit > 2 and document.weights[-1]:
        cuts[-2] -= 1
    return [replace(document, ids=document.ids[a:b], weights=document.weights[a:b]) for a, b in zip(cuts, cuts[1:], strict=False)]


def _sample(documents: Sequence[Tokens]) -> EncodedSample:
    labels = [_labels(document) for document in documents]
    if len(documents) == 1 and not documents[0].weighted:
        return EncodedSample(input_ids=documents[0].ids, labels=labels[0], kinds=np.array([documents[0].kind], dtype=np.int8))
    return EncodedSample(
        input_ids=np.concatenate([document.ids for document in documents]),
        labels=np.concatenate(labels),
        seq_lens=np.array([len(document.ids) for document in documents], dtype=np.int32),
        kinds=np.array([document.kind for document in documents], dtype=np.int8),
        loss_weights=_loss_weights(documents),
    )


def _loss_weights(documents: Sequence[Tokens]) -> np.ndarray | None:
    """Float32 [T] weight of each label; None where all are 0 or 1."""
    if not any(document.weighted for document in documents):
        return None
    weights = np.concatenate([np.append(document.weights[1:], np.float32(0)) for document in documents])
    return None if bool(((weights == 0) | (weights == 1)).all()) else weights


def _labels(document: Tokens) -> np.ndarray:
    labels = np.empty(len(document.ids), dtype=np.int32)
    labels[:-1] = np.where(document.weights[1:], document.ids[1:], IGNORE)
    labels[-1] = IGNORE
    return labels

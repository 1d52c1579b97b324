"""Rows that say which answer is better, whether one is good, which texts are alike, or what the right answer is."""

from __future__ import annotations

import json
import re
from typing import Any

from twinkle_core.errors import DataError
from twinkle_core.preprocessor.conversations import asked, conversation, with_media, with_system
from twinkle_core.preprocessor.fields import Row, first_key, optional_text, short, text
from twinkle_core.preprocessor.media import References, attach_media, refuse_media
from twinkle_core.preprocessor.messages import read_messages
from twinkle_core.types import EmbeddingPair, Message, Trajectory

LABELS = ("label", "kto_tag", "desirable")
_SAID = {"true": True, "false": False, "1": True, "0": False}
TRUTHS = ("ground_truth", "answer", "solution")
_NUMBER = re.compile(r"\s*[-+\u2212]?[$\u20ac\u00a3]?(\d[\d,]*(\.\d+)?|\.\d+)%?\s*|.*####\s*[-+\u2212$]*[\d.].*", re.DOTALL)


def read_preference(row: Row) -> Trajectory:
    """`chosen` and `rejected`: texts, messages or lists of messages after a prompt; or two whole conversations with one beginning."""
    found: References = {}
    if first_key(row, "messages", "conversations", "instruction", "prompt", "question", "query", "problem"):
        prompt = asked(row, found)
        chosen, rejected = (_after(prompt, _answer(row, side), row, side) for side in ("chosen", "rejected"))
    else:
        for side in ("chosen", "rejected"):
            if not isinstance(row.get(side), list):
                raise DataError(f"no prompt, so '{side}' must be a whole conversation, got {short(row.get(side))}")
        chosen, other = read_messages(row["chosen"], found, "chosen"), dict[str, list[Any]]()
        rejected = read_messages(row["rejected"], other, "rejected")
        if other != found:
            raise DataError("'chosen' and 'rejected' show different images, videos or audios")
        chosen, rejected = with_system(chosen, row), with_system(rejected, row)
        prompt = _shared(chosen, rejected)
        if not any(message["role"] != "system" for message in prompt):
            raise DataError("'chosen' and 'rejected' do not begin with the same question")
    for side, messages in (("chosen", chosen), ("rejected", rejected)):
        if messages[-1]["role"] != "assistant" or len(messages) <= len(_shared(chosen, rejected)):
            raise DataError(f"'{side}' must end with an answer of the assistant that the other side does not have")
    trajectory: Trajectory = {"messages": chosen, "rejected_messages": rejected}
    attach_media(trajectory, row, found)
    return trajectory


def judgement(value: Any) -> bool | None:
    """What a judgement says: true or false, 1 or 0, or these as text (a CSV file has no other); None for all else."""
    if isinstance(value, str):
        return _SAID.get(value.strip().lower())
    return bool(value) if isinstance(value, (bool, int)) and value in (0, 1) else None


def read_judged(row: Row) -> Trajectory:
    """A conversation, or `prompt` and `completion`, with a `label` or `kto_tag` that is true or false (KTO)."""
    key = first_key(row, *LABELS)
    desirable = judgement(row[key]) if key else None
    if desirable is None:
        raise DataError(f"'{key or 'label'}' must be true or false (or 1 or 0), got {short(row.get(key or 'label'))}")
    found: References = {}
    if row.get("completion") is None and first_key(row, "messages", "conversations"):
        messages = conversation(row, found)
    else:
        prompt = asked(row, found)
        side = first_key(row, "completion", "response", "output", "answer") or "completion"
        messages = _after(prompt, _answer(row, side), row, side)
    if messages[-1]["role"] != "assistant":
        raise DataError("a judged conversation ends with the assistant's answer")
    return {**with_media(messages, row, found), "desirable": desirable}


def read_prompt(row: Row) -> Trajectory:
    """A question that an answer is to be sampled for, with the right answer where it is known.

    The right answer is kept as 'ground_truth' and 'answer'. The scorer 'last_number' is named with it where it is a
    number (or marked by '####'), else the row's own `scorer`, or none: no other rule would read a free answer rightly.
    """
    found: References = {}
    messages = asked(row, found)
    if messages[-1]["role"] not in ("user", "tool"):
        raise DataError("a prompt ends with the user's turn; layout 'messages' learns from the answer that is there")
    trajectory = with_media(messages, row, found)
    if any(message["role"] == "assistant" for message in messages):
        trajectory["prompt_only"] = True
    truth = _ground_truth(row)
    if truth is not None:
        trajectory["user_data"] = scored(truth, optional_text(row, "scorer"))
    return trajectory


def read_embedding(row: Row) -> Trajectory:
    """`anchor`/`query` and `positive`/`pos`, with `negative`, `negative_1`…, `negatives` or `neg` (texts or lists of them).

    The key names of sentence-transformers and of FlagEmbedding. Of several positives the first is taken.
    """
    refuse_media(row, "embedding")
    positives = _texts(row, first_key(row, "positive", "pos") or "positive")
    if not positives:
        raise DataError("there is no positive text")
    pair: EmbeddingPair = {"anchor": text(row, first_key(row, "anchor", "query") or "anchor"), "positive": positives[0]}
    keys = [key for key in row if re.fullmatch(r"neg|negatives?|negative_\d+", key) and row[key] is not None]
    if negatives := [negative for key in keys for negative in _texts(row, key)]:
        pair["negatives"] = negatives
    return {"messages": [], "embedding": pair}


def scored(truth: str, scorer: str = "") -> list[tuple[str, str]]:
    """The right answer as `user_data`, where rewards ('ground_truth') and the evaluator ('scorer', 'answer') look for it."""
    name = scorer or ("last_number" if _NUMBER.fullmatch(truth) else "")
    return [("ground_truth", truth), *([("scorer", name)] if name else []), ("answer", truth)]


def _answer(row: Row, key: str) -> list[Message]:
    value = row.get(key)
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    found: References = {}
    messages = read_messages([value] if isinstance(value, dict) else value, found, key)
    if found:
        raise DataError(f"'{key}' shows images, videos or audios; they are read in the prompt only")
    return messages


def _after(prompt: list[Message], answer: list[Message], row: Row, key: str) -> list[Message]:
    """Prompt and answer as one conversation; an answer that repeats the prompt is one already."""
    whole = with_system(answer, row) if answer[0]["role"] != "assistant" else answer
    if whole[: len(prompt)] == prompt:
        return whole
    if answer[0]["role"] not in ("assistant", "tool"):
        raise DataError(f"'{key}' begins with a {answer[0]['role']} turn, but not with the prompt")
    return [*prompt, *answer]


def _shared(one: list[Message], other: list[Message]) -> list[Message]:
    length = next((index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:length]


def _ground_truth(row: Row) -> str | None:
    key = first_key(row, *TRUTHS)
    value = row[key] if key else (row.get("reward_model") or {}).get("ground_truth")
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def _texts(row: Row, key: str) -> list[str]:
    value = row.get(key)
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(item, str) for item in texts):
        raise DataError(f"'{key}' must be text or a list of texts, got {short(value)}")
    return texts

"""Greedy answers to prompts, in left-padded batches with a key-value cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from twinkle_core.errors import DataError
from twinkle_core.types import Progress


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Example: `Answer(text='Paris.', num_tokens=3, truncated=False)`."""

    text: str
    """Without special tokens and outer white space."""
    num_tokens: int
    """Generated tokens, the stop token included."""
    truncated: bool
    """The limit came before a stop token."""


def generate(
    model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], progress: Progress, *, max_new_tokens: int, batch_size: int = 16
) -> list[Answer]:
    """One `Answer` a prompt, in the order given. `prompts` are token ids that end where the answer begins.

    Greedy, whatever the model's own generation settings say; of those only the stop ids are kept. Prompts are sorted by length before they
    are batched; padding is masked, so an answer depends on the batch only where two tokens tie within float rounding.
    Raises `DataError` for an empty prompt and for one that with its answer exceeds the model's positions.
    """
    _check_lengths(model, prompts, max_new_tokens)
    order = sorted(range(len(prompts)), key=lambda index: (len(prompts[index]), index))
    stop_ids = _stop_ids(model, tokenizer)
    answers: dict[int, Answer] = {}
    for start in range(0, len(order), batch_size):
        indices = order[start : start + batch_size]
        new_ids_BT = _generate_batch(model, [prompts[index] for index in indices], stop_ids, max_new_tokens)
        answers.update((index, _answer(tokenizer, ids, stop_ids)) for index, ids in zip(indices, new_ids_BT, strict=True))
        progress.advance(len(indices))
    return [answers[index] for index in range(len(prompts))]


@torch.inference_mode()
def _generate_batch(model: Any, prompts: Sequence[Sequence[int]], stop_ids: Sequence[int], max_new_tokens: int) -> list[list[int]]:
    from transformers import GenerationConfig

    pad_id = stop_ids[0] if stop_ids else 0  # masked: which id it is changes nothing
    longest = max(len(prompt) for prompt in prompts)
    input_ids_BT = np.full((len(prompts), longest), pad_id, dtype=np.int64)
    mask_BT = np.zeros((len(prompts), longest), dtype=np.int64)
    for row, prompt in enumerate(prompts):
        input_ids_BT[row, longest - len(prompt) :] = prompt
        mask_BT[row, longest - len(prompt) :] = 1
    # Set on the model, not passed: what a passed config leaves open is filled from the model's own (a repetition penalty, say).
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=list(stop_ids) or None, pad_token_id=pad_id, use_cache=True
    )
    ids_BT = model.generate(torch.from_numpy(input_ids_BT).to(model.device), attention_mask=torch.from_numpy(mask_BT).to(model.device))
    return [row[longest:] for row in ids_BT.tolist()]


def _answer(tokenizer: Any, new_ids: list[int], stop_ids: Sequence[int]) -> Answer:
    stop = next((position for position, token in enumerate(new_ids) if token in stop_ids), None)
    kept = new_ids if stop is None else new_ids[:stop]
    text = tokenizer.decode(kept, skip_special_tokens=True).strip()
    return Answer(text=text, num_tokens=len(kept) + (stop is not None), truncated=stop is None)


def _stop_ids(model: Any, tokenizer: Any) -> list[int]:
    """Every id that ends an answer: of the generation settings, of the model's config and of the tokenizer."""
    found = [model.generation_config.eos_token_id, model.config.eos_token_id, tokenizer.eos_token_id]
    flat = [item for value in found for item in (value if isinstance(value, (list, tuple)) else [value])]
    return sorted({int(item) for item in flat if item is not None})


def fits(model: Any, prompt: Sequence[int], max_new_tokens: int) -> bool:
    """Whether the model has positions for the prompt and an answer of `max_new_tokens`."""
    limit = getattr(model.config, "max_position_embeddings", None)
    return limit is None or len(prompt) + max_new_tokens <= limit


def _check_lengths(model: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    limit = getattr(model.config, "max_position_embeddings", None)
    for index, prompt in enumerate(prompts):
        if not len(prompt):
            raise DataError(f"prompt {index} is empty: an answer needs at least one token before it")
        if not fits(model, prompt, max_new_tokens):
            raise DataError(
                f"prompt {index} has {len(prompt)} tokens and with max_new_tokens={max_new_tokens} exceeds the model's {limit} positions: "
                "lower max_new_tokens or drop the row"
            )

"""Trajectories -> tokens and labels, in a worker process: needs tokenizers, jinja2 and numpy, not transformers, and pickles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from twinkle_core.errors import DataError
from twinkle_core.template.documents import Document, Plan, Planner
from twinkle_core.template.labels import Rule, Tokens, outcome, token_weights
from twinkle_core.template.outcome import Outcome
from twinkle_core.template.tokenized import TextTokenizer, Tokenized
from twinkle_core.types import DocumentKind, Trajectory


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """Encodes trajectories for one tokenizer and one `TemplateConfig`. Made by `Template.encoder`.

    The ids of a conversation are those of the tokenizer's own `apply_chat_template` on it; those of a text are the tokenizer's own
    with the end-of-text token after them; labels are already shifted.
    """

    tokenizer: TextTokenizer
    planner: Planner
    before: tuple[int, ...]
    """What the tokenizer puts before a text that is no conversation."""
    after: tuple[int, ...]
    eos: int | None
    """Ends a text to learn."""
    max_length: int
    truncation: Rule
    skip_bad_rows: bool

    def outcomes(self, trajectories: Sequence[Trajectory], *, add_generation_prompt: bool = False) -> list[Outcome]:
        """What becomes of each trajectory; with `add_generation_prompt`, of its messages as a prompt to be answered.

        Raises `DataError("conversation K: reason")`, K from 1, for a bad one, unless they are skipped.
        """
        plan_one = self.planner.plan_prompt if add_generation_prompt else self.planner.plan
        plans = [self._attempt(number, plan_one, trajectory) for number, trajectory in enumerate(trajectories, start=1)]
        documents = [document for plan in plans if isinstance(plan, Plan) for document in plan.documents]
        tokenized = iter(self.tokenizer([document.text for document in documents], [document.head for document in documents]))
        return [
            plan if isinstance(plan, Outcome) else self._attempt(number, self._finish, plan, [next(tokenized) for _ in plan.documents])
            for number, plan in enumerate(plans, start=1)
        ]

    def _attempt(self, number: int, work: Any, *arguments: Any) -> Any:
        try:
            return work(*arguments)
        except DataError as error:
            if self.skip_bad_rows:
                return Outcome(refused=str(error))
            raise DataError(f"conversation {number}: {error}") from None

    def _finish(self, plan: Plan, found: Sequence[Tokenized | None]) -> Outcome:
        documents = [self._tokens(document, tokenized) for document, tokenized in zip(plan.documents, found, strict=True)]
        return outcome(documents, self.truncation, self.max_length, plan.unprinted_tools)

    def _tokens(self, document: Document, tokenized: Tokenized | None) -> Tokens:
        if tokenized is None:
            raise DataError("the text holds half of a surrogate pair, which is no Unicode; replace or remove it")
        if document.plain:
            ids = self._around(document, tokenized.ids)
            weights, weighted = np.full(len(ids), document.base, dtype=np.float32), False
        else:
            ids = tokenized.ids
            weights = token_weights(tokenized, document.spans, document.base)
            weighted = any(weight not in (0, 1) for _, _, weight in document.spans)
        if not len(ids):
            raise DataError("the text has no token")
        return Tokens(ids, weights, document.kind, weighted)

    def _around(self, document: Document, ids: np.ndarray) -> np.ndarray:
        """The ids of a text with the tokenizer's own around them, and its end where it is to be learnt."""
        end: tuple[int, ...] = ()
        if document.kind == DocumentKind.PLAIN:
            if self.eos is None:
                raise DataError("the tokenizer has no eos_token to end a text with; set it in tokenizer_config.json")
            end = () if self.after[-1:] == (self.eos,) else (self.eos,)
        return np.concatenate([np.array(self.before, np.int32), ids, np.array(self.after + end, np.int32)])

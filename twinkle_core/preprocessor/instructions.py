"""Preprocessors of instruction and preference sets."""

from __future__ import annotations

from twinkle_core.preprocessor.base import Preprocessor
from twinkle_core.preprocessor.conversations import read_alpaca
from twinkle_core.preprocessor.fields import Row, text
from twinkle_core.types import Message, Trajectory


class AlpacaProcessor(Preprocessor):
    """`instruction`, `input` and `output` (https://github.com/tatsu-lab/stanford_alpaca): one exchange."""

    def __call__(self, row: Row) -> Trajectory:
        return read_alpaca(row)


class EmojiDPOProcessor(Preprocessor):
    """A question with two answers, one in Chinese with emoji and one in English (shareAI/DPO-zh-en-emoji): a preference pair."""

    def __init__(
        self,
        system: str | None = None,
        chosen_key: str = "answer_zh",
        rejected_key: str = "answer_en",
        prompt_key: str = "prompt",
    ) -> None:
        self.system, self.chosen_key, self.rejected_key, self.prompt_key = system, chosen_key, rejected_key, prompt_key

    def __call__(self, row: Row) -> Trajectory:
        prompt = question(text(row, self.prompt_key), self.system)
        chosen, rejected = text(row, self.chosen_key), text(row, self.rejected_key)
        return {
            "messages": [*prompt, {"role": "assistant", "content": chosen}],
            "rejected_messages": [*prompt, {"role": "assistant", "content": rejected}],
        }


def question(asked: str, system: str | None) -> list[Message]:
    """The user's turn, after a system turn where there is a text for one."""
    turn: Message = {"role": "user", "content": asked}
    return [{"role": "system", "content": system}, turn] if system else [turn]

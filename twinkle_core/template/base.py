"""Conversations -> token ids and labels, through the tokenizer's own chat template. Needs transformers, not torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import numpy as np

from storage.fingerprint import digest_folder
from twinkle_core.config import TemplateConfig, validate
from twinkle_core.errors import ConfigError, DataError
from twinkle_core.template.masks import Span, StopMarks, assistant_spans, start_of_turn
from twinkle_core.types import IGNORE, EncodedSample, Message, Trajectory

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TOKENIZER_FILES = (
    "tokenizer*.json", "tokenizer.model", "*.tiktoken", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "spiece.model", "chat_template*", "*chat_templates/*", "generation_config.json",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one conversation."""

    sample: EncodedSample | None
    """None where it was dropped."""
    dropped: str | None = None
    """Why: 'too_long' or 'no_loss' (no supervised token)."""
    num_tokens: int
    """Length before truncation."""
    unprinted_tools: bool
    """The conversation has tools or tool calls that the chat template does not print."""


class Template:
    """Renders and tokenizes conversations for one tokenizer and one `TemplateConfig`.

    Settings come as `config`, or one by one under Twinkle's names. `batch_encode` gives labels that are already shifted.
    Rendering is a pure function: templates that print today's date get the fixed day 26 Jul 2024 (Llama 3's default).
    """

    def __init__(
        self,
        model_id: str | Path,
        config: TemplateConfig | None = None,
        *,
        max_length: int | None = None,
        truncation_strategy: str | None = None,
        default_system: str | None = None,
        chat_template: str | None = None,
        learn: str | None = None,
    ) -> None:
        given: dict[str, Any] = {
            "max_length": max_length, "truncation": truncation_strategy, "default_system": default_system,
            "chat_template": chat_template, "learn": learn,
        }  # fmt: skip
        given = {name: value for name, value in given.items() if value is not None}
        if config is not None and given:
            raise ConfigError(f"Template takes a config or single settings, got a config and {sorted(given)}")
        self.config: TemplateConfig = config or validate(TemplateConfig, given)
        self.tokenizer = _load_tokenizer(Path(model_id), self.config.chat_template)
        added = self.tokenizer.added_tokens_decoder.values()
        special = {token.content for token in added if token.special} | set(self.tokenizer.all_special_tokens)
        self._stops = StopMarks(texts=tuple(sorted(special)), eos=self.tokenizer.eos_token or "")

    def encode(self, trajectory: Trajectory) -> EncodedSample:
        """One conversation. Raises `DataError` where it is to be dropped (too long, nothing to learn) or cannot be rendered."""
        outcome = self.outcomes([trajectory])[0]
        if outcome.sample is None:
            raise DataError(f"the conversation of {outcome.num_tokens} tokens is dropped: {outcome.dropped}")
        return outcome.sample

    def batch_encode(self, trajectories: Sequence[Trajectory]) -> list[EncodedSample]:
        """Samples in the same order, without those that truncation 'delete' drops (`outcomes` tells which)."""
        return [outcome.sample for outcome in self.outcomes(trajectories) if outcome.sample is not None]

    def outcomes(self, trajectories: Sequence[Trajectory]) -> list[Outcome]:
        """What becomes of each conversation. Raises `DataError` that starts with 'conversation K' (from 1) for a bad one."""
        texts, spans = [], []
        for number, trajectory in enumerate(trajectories, start=1):
            try:
                text, found = self.render_with_spans(trajectory)
            except DataError as error:
                raise DataError(f"conversation {number}: {error}") from None
            texts.append(text)
            spans.append(found)
        if not texts:
            return []
        encoded = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False)
        results = []
        for number, (trajectory, ids, encoding, found) in enumerate(
            zip(trajectories, encoded["input_ids"], encoded.encodings, spans, strict=True), start=1
        ):
            unprinted = self._leaves_tools_out(trajectory, texts[number - 1])
            try:
                results.append(self._outcome(np.array(ids, dtype=np.int32), supervised_tokens(encoding, len(ids), found), unprinted))
            except DataError as error:
                raise DataError(f"conversation {number}: {error}") from None
        return results

    def render_with_spans(self, trajectory: Trajectory) -> tuple[str, list[Span]]:
        """The text that is tokenized, and the character spans of it that are learnt."""
        messages, tools = self._messages(trajectory), trajectory.get("tools")

        def render(part: Sequence[Message], add_generation_prompt: bool) -> str:
            return self._render(part, tools, add_generation_prompt)

        last_turn_only = self.config.learn == "last_turn"
        template = self.tokenizer.get_chat_template(None, tools)
        if not _GENERATION_TAG.search(template):
            text = render(messages, False)
            return text, assistant_spans(messages, text, render, self._stops, last_turn_only=last_turn_only)
        text, spans = self._render_tagged(messages, tools, template)
        if last_turn_only:
            last = max(number for number, message in enumerate(messages) if message["role"] == "assistant")
            start = start_of_turn(messages, last, text, render) if last else 0
            spans = [span for span in spans if span[1] > start]
        return text, spans

    def render_prompt(self, trajectory: Trajectory) -> list[int]:
        """Token ids up to where the last assistant turn starts (of the whole conversation without such a turn), ready to be answered."""
        messages = self._messages(trajectory)
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        text = self._render(messages[: turns[-1]] if turns else messages, trajectory.get("tools"), True)
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def decode(self, ids: Sequence[int] | np.ndarray, *, skip_special_tokens: bool = False) -> str:
        """The text of token ids."""
        return str(self.tokenizer.decode([int(token) for token in ids], skip_special_tokens=skip_special_tokens))

    def _messages(self, trajectory: Trajectory) -> list[Message]:
        messages = list(trajectory["messages"])
        if self.config.default_system is not None and not any(message["role"] == "system" for message in messages):
            messages.insert(0, {"role": "system", "content": self.config.default_system})
        return messages

    def _render(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None, add_generation_prompt: bool) -> str:
        from jinja2 import TemplateError

        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt, strftime_now=_fixed_date
            )
        except (TemplateError, TypeError, ValueError, AttributeError, KeyError) as error:
            raise DataError(f"the chat template refuses the conversation: {error}") from error
        return str(text)

    def _render_tagged(self, messages: list[Message], tools: list[dict[str, Any]] | None, template: str) -> tuple[str, list[Span]]:
        """Text and spans of a template with {% generation %} blocks: those of the tokenizer's own assistant mask."""
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered: Any = render_jinja_template(
                conversations=cast(Any, [messages]), tools=cast(Any, tools), chat_template=template, return_assistant_tokens_mask=True,
                strftime_now=_fixed_date, **self.tokenizer.special_tokens_map,
            )  # fmt: skip
        except (TemplateError, TypeError, ValueError, AttributeError, KeyError) as error:
            raise DataError(f"the chat template refuses the conversation: {error}") from error
        (text,), (spans,) = rendered
        return str(text), [(int(start), int(end)) for start, end in spans if start < end]

    def _leaves_tools_out(self, trajectory: Trajectory, text: str) -> bool:
        """Whether the rendering is the same without the conversation's tools, or without its tool calls."""
        messages, tools = self._messages(trajectory), trajectory.get("tools")
        if tools and self._render(messages, None, False) == text:
            return True
        without = [{key: value for key, value in message.items() if key != "tool_calls"} for message in messages]
        return without != messages and self._render(without, tools, False) == text  # type: ignore[arg-type]

    def _outcome(self, ids: np.ndarray, supervised: np.ndarray, unprinted: bool) -> Outcome:
        num_tokens, limit, rule = len(ids), self.config.max_length, self.config.truncation
        if num_tokens > limit:
            if rule == "raise":
                raise DataError(f"{num_tokens} tokens, but max_length is {limit}; raise it, or set truncation to delete, left or right")
            if rule == "delete":
                return Outcome(sample=None, dropped="too_long", num_tokens=num_tokens, unprinted_tools=unprinted)
            kept = slice(-limit, None) if rule == "left" else slice(0, limit)
            ids, supervised = ids[kept], supervised[kept]
        labels = np.full(len(ids), IGNORE, dtype=np.int32)
        labels[:-1][supervised[1:]] = ids[1:][supervised[1:]]
        if not (labels != IGNORE).any():
            if rule == "delete":
                return Outcome(sample=None, dropped="no_loss", num_tokens=num_tokens, unprinted_tools=unprinted)
            cut = f" after truncation '{rule}' from {num_tokens} to {len(ids)} tokens" if num_tokens > len(ids) else ""
            raise DataError(f"no supervised token is left{cut}: nothing to learn; raise max_length, or set truncation to delete")
        return Outcome(sample=EncodedSample(input_ids=ids, labels=labels), num_tokens=num_tokens, unprinted_tools=unprinted)


def supervised_tokens(encoding: Any, num_tokens: int, spans: Sequence[Span]) -> np.ndarray:
    """Bool [T]: tokens that share a character with a span, whole tokens only.

    Counts to the last token of a character: the tokenizer's own mask stops at the first, and so loses the end of an emoji.
    """
    mask = np.zeros(num_tokens, dtype=bool)
    for start, end in spans:
        first = next((token for at in range(start, end) if (token := encoding.char_to_token(at)) is not None), None)
        if first is None:
            continue
        last = first + 1
        while last < num_tokens and encoding.token_to_chars(last) is not None and encoding.token_to_chars(last)[0] < end:
            last += 1
        mask[first:last] = True
    return mask


def tokenizer_digest(folder: Path) -> str:
    """Digest of the files of a model folder that change token ids or prompts: tokenizer, chat template, generation config."""
    folder = Path(folder)
    names = sorted({path.relative_to(folder).as_posix() for pattern in _TOKENIZER_FILES for path in folder.glob(pattern) if path.is_file()})
    if not names:
        raise ConfigError(f"no tokenizer files in {folder}; expected tokenizer.json beside the weights")
    return digest_folder(folder, names)


def _fixed_date(form: str) -> str:
    return datetime(2024, 7, 26).strftime(form)


def _load_tokenizer(folder: Path, chat_template: str | None) -> Any:
    from transformers import AutoTokenizer

    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder: give the folder of a model in Hugging Face's layout")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load the tokenizer in {folder}: {error}") from error
    if not tokenizer.is_fast:
        raise ConfigError(f"the tokenizer in {folder} has no tokenizer.json; save it once with a fast tokenizer")
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    if isinstance(tokenizer.chat_template, Mapping) and "default" not in tokenizer.chat_template:
        names = sorted(tokenizer.chat_template)
        raise ConfigError(f"the tokenizer in {folder} has the chat templates {names}, none called 'default'; set chat_template")
    if not tokenizer.chat_template:
        raise ConfigError(f"the tokenizer in {folder} has no chat template; set template.chat_template")
    return tokenizer

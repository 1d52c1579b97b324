"""Conversations -> token ids and labels, through the tokenizer's own chat template. Loading a tokenizer needs transformers, not torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from storage.fingerprint import digest_folder
from twinkle_core.errors import ConfigError, DataError
from twinkle_core.template.chat_template import ChatTemplate
from twinkle_core.template.documents import Planner
from twinkle_core.template.encoder import Encoder
from twinkle_core.template.message_form import probe
from twinkle_core.template.outcome import Outcome
from twinkle_core.template.spans import SpanFinder
from twinkle_core.template.stops import StopMarks
from twinkle_core.template.tokenized import TextTokenizer
from twinkle_core.types import IGNORE, DocumentKind, EncodedSample, Trajectory

if TYPE_CHECKING:
    from twinkle_core.config import TemplateConfig

_TOKENIZER_FILES = (
    "tokenizer*.json", "tokenizer.model", "*.tiktoken", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "spiece.model", "chat_template*", "*chat_templates/*", "generation_config.json", "preprocessor_config.json", "encoding/*.py",
)  # fmt: skip


class Template:
    """Renders and tokenizes trajectories for one tokenizer and one `TemplateConfig`.

    Settings come as `config`, or one by one under Twinkle's names. Labels come out shifted. Rendering is a pure function: templates that
    print today's date get the fixed day 26 Jul 2024.
    """

    tool_call_style = "hermes_qwen"
    """How `parse_tool_call` reads calls, unless it is told."""

    def __init__(
        self,
        model_id: str | Path,
        config: TemplateConfig | None = None,
        *,
        max_length: int | None = None,
        truncation_strategy: str | None = None,
        default_system: str | None = None,
        chat_template: str | None = None,
        enable_thinking: bool | None = None,
        learn: str | None = None,
    ) -> None:
        """Raises `ConfigError` where a setting is wrong, or the folder `model_id` holds no tokenizer with a chat template."""
        given: dict[str, Any] = {
            "max_length": max_length, "truncation": truncation_strategy, "default_system": default_system,
            "chat_template": chat_template, "enable_thinking": enable_thinking, "learn": learn,
        }  # fmt: skip
        given = {name: value for name, value in given.items() if value is not None}
        if config is not None and given:
            raise ConfigError(f"Template takes a config or single settings, got a config and {sorted(given)}")
        self.config: TemplateConfig = config or _config(given)
        self.folder = Path(model_id)
        self._encoder = self._build_encoder(self._load())

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of transformers: one of its own, so that what is set on it (padding, added tokens) does not reach `encode`."""
        return self._load()

    def _load(self) -> Any:
        named = self.config.chat_template
        return _load_tokenizer(self.folder, self._own_chat_template() if named is None else named)

    def _own_chat_template(self) -> str | None:
        """What stands in for the tokenizer's chat template where the config names none; None for nothing."""
        return None

    def encoder(self) -> Encoder:
        """What encodes: pickles, and works in a process that never imports transformers."""
        return self._encoder

    def outcomes(self, trajectories: Sequence[Trajectory]) -> list[Outcome]:
        """What becomes of each trajectory. Raises `DataError` that starts with 'conversation K' (from 1) for a bad one."""
        return self._encoder.outcomes(trajectories)

    def encode(self, trajectory: Trajectory, add_generation_prompt: bool = False) -> EncodedSample:
        """One sample. With `add_generation_prompt`, all messages as a prompt to be answered, without labels.

        Raises `DataError` where it cannot be encoded, is to be dropped (too long, nothing to learn), or is cut into several.
        """
        outcome = self._encoder.outcomes([trajectory], add_generation_prompt=add_generation_prompt)[0]
        if outcome.refused is not None:
            raise DataError(outcome.refused)
        if len(outcome.samples) != 1:
            what = f"cut into {len(outcome.samples)} samples; use batch_encode" if outcome.samples else f"dropped: {outcome.dropped}"
            raise DataError(f"the conversation of {outcome.num_tokens} tokens is {what}")
        return outcome.samples[0]

    def batch_encode(self, trajectories: Sequence[Trajectory], add_generation_prompt: bool = False) -> list[EncodedSample]:
        """All samples in order: none of a trajectory that is dropped or skipped (`outcomes` tells which), several of one that is split."""
        outcomes = self._encoder.outcomes(trajectories, add_generation_prompt=add_generation_prompt)
        return [sample for outcome in outcomes for sample in outcome.samples]

    def check(self, trajectory: Trajectory) -> Trajectory | None:
        """The trajectory where it gives a sample, else None."""
        return self.batch_check([trajectory])[0]

    def batch_check(self, trajectories: Sequence[Trajectory]) -> list[Trajectory | None]:
        """Each trajectory that gives a sample; None in the place of one that does not."""
        checked: list[Trajectory | None] = []
        for trajectory in trajectories:
            try:
                checked.append(trajectory if self.outcomes([trajectory])[0].samples else None)
            except DataError:
                checked.append(None)
        return checked

    def render_prompt(self, trajectory: Trajectory) -> list[int]:
        """Token ids up to where the last assistant turn starts (of the whole conversation without such a turn), ready to be answered."""
        messages = trajectory["messages"]
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        asked = cast(Trajectory, {**trajectory, "messages": messages[: turns[-1]] if turns else messages})
        (document,) = self._encoder.planner.plan_prompt(asked).documents
        (tokenized,) = self._encoder.tokenizer([document.text])
        if tokenized is None:
            raise DataError("the conversation holds half of a surrogate pair, which is no Unicode; replace or remove it")
        return [int(token) for token in tokenized.ids]

    def format_trajectory(self, trajectory: Trajectory, add_default_system: bool = False) -> Trajectory:
        """The trajectory with its messages as the chat template gets them; with the default system message if asked for."""
        planner = self._encoder.planner
        messages = planner.messages(trajectory["messages"]) if add_default_system else trajectory["messages"]
        return cast(Trajectory, {**trajectory, "messages": planner.formatted(messages)})

    def decode(self, token_ids: Sequence[int] | np.ndarray, *, skip_special_tokens: bool = False) -> str:
        """The text of token ids."""
        return str(self.tokenizer.decode([int(token) for token in token_ids], skip_special_tokens=skip_special_tokens))

    def batch_decode(self, token_ids: Sequence[Sequence[int] | np.ndarray], *, skip_special_tokens: bool = False) -> list[str]:
        """The text of each list of token ids."""
        return [self.decode(ids, skip_special_tokens=skip_special_tokens) for ids in token_ids]

    def concat_input_feature(self, prompt_input_feature: Mapping[str, Any], new_tokens: Sequence[int]) -> dict[str, Any]:
        """An `InputFeature` with sampled tokens after it, which are learnt beside what was learnt before. Ids are kept as they were
        sampled: nothing is decoded. Raises `DataError` for a prompt of several documents."""
        return concat_input_feature(prompt_input_feature, new_tokens)

    def parse_tool_call(self, decoded: str, style: str | None = None) -> list[dict[str, Any]]:
        """The tool calls in a model's answer, in OpenAI's form."""
        from twinkle_core.template.tool_calls import parse_tool_calls

        return parse_tool_calls(decoded, style or self.tool_call_style)

    def clean_tool_call(self, decoded: str, style: str | None = None) -> str:
        """The answer without its tool calls."""
        from twinkle_core.template.tool_calls import clean_tool_calls

        return clean_tool_calls(decoded, style or self.tool_call_style)

    def _build_encoder(self, tokenizer: Any) -> Encoder:
        config = self.config
        added = tokenizer.added_tokens_decoder.values()
        special = {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)
        stops = StopMarks(texts=tuple(sorted(special)), eos=tokenizer.eos_token or "")
        variables = {**tokenizer.special_tokens_map}
        if config.enable_thinking is not None:
            variables["enable_thinking"] = config.enable_thinking
        source = tokenizer.chat_template
        default = ChatTemplate(source["default"] if isinstance(source, Mapping) else source, variables)
        tool_use = ChatTemplate(source["tool_use"], variables) if isinstance(source, Mapping) and "tool_use" in source else None
        planner = Planner(
            SpanFinder(default, stops),
            None if tool_use is None else SpanFinder(tool_use, stops),
            probe(tool_use or default),
            config.learn,
            config.default_system,
        )
        before, after = _added_around(tokenizer)
        return Encoder(
            tokenizer=TextTokenizer(_bare(tokenizer)), planner=planner, before=before, after=after, eos=tokenizer.eos_token_id,
            max_length=config.max_length, truncation=config.truncation, skip_bad_rows=config.on_bad_row == "skip",
        )  # fmt: skip


def concat_input_feature(prompt: Mapping[str, Any], new_tokens: Sequence[int] | np.ndarray) -> dict[str, Any]:
    """See `Template.concat_input_feature`."""
    ids, labels = np.asarray(prompt["input_ids"], dtype=np.int32), np.asarray(prompt["labels"], dtype=np.int32)
    new, none = np.asarray(new_tokens, dtype=np.int32), np.array([IGNORE], dtype=np.int32)
    if len(prompt.get("seq_lens", [0])) != 1:
        raise DataError(f"tokens can be appended to one document, not to {len(prompt['seq_lens'])}")
    if not len(ids):
        raise DataError("the prompt has no token, so nothing predicts the first new one")
    length = len(ids) + len(new)
    grown = {
        **prompt,
        "input_ids": np.concatenate([ids, new]),
        "labels": np.concatenate([labels[:-1], new, none]),
        "position_ids": np.arange(length, dtype=np.int32),
        "seq_lens": np.array([length], dtype=np.int32),
        "length": length,
    }
    if "kinds" in prompt and int(prompt["kinds"][0]) == DocumentKind.PROMPT:
        del grown["kinds"]
    if "loss_weights" in prompt:
        weights = np.asarray(prompt["loss_weights"], dtype=np.float32)
        grown["loss_weights"] = np.concatenate([weights[:-1], np.ones(len(new), np.float32), np.zeros(1, np.float32)])
    return grown


def tokenizer_digest(folder: Path) -> str:
    """Digest of the files of a model folder that change token ids or prompts: tokenizer, chat template, generation config."""
    folder = Path(folder)
    names = sorted({path.relative_to(folder).as_posix() for pattern in _TOKENIZER_FILES for path in folder.glob(pattern) if path.is_file()})
    if not names:
        raise ConfigError(f"no tokenizer files in {folder}; expected tokenizer.json beside the weights")
    return digest_folder(folder, names)


def _config(given: dict[str, Any]) -> TemplateConfig:
    from twinkle_core.config import TemplateConfig, validate

    return cast("TemplateConfig", validate(TemplateConfig, given))


def _bare(tokenizer: Any) -> Any:
    """Its Rust tokenizer, from now on without adding tokens, cutting, padding or trimming offsets."""
    from tokenizers import processors

    bare = tokenizer.backend_tokenizer
    if dropout := getattr(bare.model, "dropout", None):
        raise ConfigError(
            f"the tokenizer cuts at random (dropout {dropout:.3g}), so no run could be repeated; set dropout to null in tokenizer.json"
        )
    bare.no_truncation()
    bare.no_padding()
    bare.post_processor = processors.ByteLevel(trim_offsets=False)
    return bare


def _added_around(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the tokenizer puts before and after a text by itself."""
    whole = tokenizer("a", add_special_tokens=True)["input_ids"]
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    at = next(at for at in range(len(whole) - len(bare) + 1) if whole[at : at + len(bare)] == bare)
    return tuple(whole[:at]), tuple(whole[at + len(bare) :])


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
    _refuse_misread(folder, tokenizer)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    if isinstance(tokenizer.chat_template, Mapping) and "default" not in tokenizer.chat_template:
        names = sorted(tokenizer.chat_template)
        raise ConfigError(f"the tokenizer in {folder} has the chat templates {names}, none called 'default'; set chat_template")
    if not tokenizer.chat_template:
        raise ConfigError(f"the tokenizer in {folder} has no chat template; set template.chat_template")
    return tokenizer


_PROBE = "Two  words, isn't it? 12345 naïve 日本語\n\n\tx = [1]"


def _refuse_misread(folder: Path, tokenizer: Any) -> None:
    """transformers rebuilds some tokenizers by the class named in tokenizer_config.json. DeepSeek's byte-level one, read as a
    LlamaTokenizer (without the model type in config.json), loses every blank."""
    from tokenizers import Tokenizer

    file, ids = folder / "tokenizer.json", tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
    if tokenizer.decode(ids).strip() != _PROBE and file.is_file():
        own = Tokenizer.from_file(str(file)).encode(_PROBE, add_special_tokens=False).ids
        if own != ids:
            raise ConfigError(
                f"transformers reads the tokenizer in {folder} as {type(tokenizer).__name__}, whose ids are not those of its "
                "tokenizer.json; put the model's config.json beside it, or set tokenizer_class to PreTrainedTokenizerFast in its "
                "tokenizer_config.json"
            )

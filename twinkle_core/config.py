"""Settings of a fine-tune, stage by stage. Config describes; code builds.

Every field is marked `recipe` (it changes what comes out, and enters the artifact's key) or `resource` (where or how
fast it runs; changing it recomputes nothing). Unknown keys are refused, validators raise and never edit. pydantic only.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from twinkle_core.errors import ConfigError


def recipe(default: Any = ..., doc: str = "", **bounds: Any) -> Any:
    """A field that changes the output, and so the key."""
    return Field(default, description=doc, json_schema_extra={"mark": "recipe"}, **bounds)


def resource(default: Any = ..., doc: str = "", **bounds: Any) -> Any:
    """A field that says where or how fast; it never enters a key."""
    return Field(default, description=doc, json_schema_extra={"mark": "resource"}, **bounds)


class Config(BaseModel):
    """Frozen, and without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)

    def recipe_dump(self) -> dict[str, Any]:
        """Only the fields that enter the key, as plain JSON values."""
        return {name: _recipe_value(getattr(self, name)) for name in type(self).model_fields if field_mark(type(self), name) == "recipe"}


def field_mark(config: type[Config], name: str) -> str:
    """'recipe' or 'resource' of one field; raises where the mark was forgotten."""
    extra = config.model_fields[name].json_schema_extra
    if not isinstance(extra, dict) or extra.get("mark") not in ("recipe", "resource"):
        raise TypeError(f"{config.__name__}.{name} is marked neither recipe nor resource")
    return str(extra["mark"])


def _recipe_value(value: Any) -> Any:
    if isinstance(value, Config):
        return value.recipe_dump()
    if isinstance(value, (list, tuple)):
        return [_recipe_value(item) for item in value]
    return value


Scalar = str | int | float | bool


class ModelConfig(Config):
    """The base model."""

    source: str = resource(
        doc="Where the base model lies: a folder or .gguf file, s3://…, hf://org/name@revision (or org/name), "
        "ms://org/name@revision, pypi://distribution/file.gguf. Its content digest enters the keys, not this address."
    )


class FilterConfig(Config):
    """Which trajectories are kept: a filter of `twinkle_core.preprocessor`, or a function of the user's."""

    name: str = recipe(doc="Name of a filter, e.g. LengthFilter, or FILE.py:FUNCTION in the folder of trusted code.")
    args: dict[str, Scalar | tuple[Scalar, ...]] = recipe({}, "Arguments of the filter.")


class SourceConfig(Config):
    """One source of rows."""

    name: str = recipe(doc="Name of the source in reports and splits.", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    uri: str | tuple[str, ...] = resource(
        doc="File, list of files, folder or glob (jsonl, json, csv, parquet, arrow, txt; plain, .gz or .zst), local or s3://…; "
        "hf://org/name@revision?subset=…&split=…, ms://org/name@revision?…; reasoning_gym://NAME?size=…&seed=…; builtin://self_cognition. "
        "The digest of the content enters the key, not this address."
    )
    format: Literal[
        "auto", "messages", "sharegpt", "alpaca", "prompt_completion", "query_response", "text", "preference", "judged", "prompt",
        "embedding",
    ] = recipe("auto", "Layout of the rows; auto looks at the keys of the first row and says what it found.")  # fmt: skip
    columns: dict[str, str] = recipe({}, "Renames keys of the rows before anything looks at them: {theirs: ours}.")
    processor: str | None = recipe(
        None, "Preprocessor applied to each row: a name, e.g. GSM8KProcessor, or FILE.py:FUNCTION in the folder of trusted code."
    )
    processor_args: dict[str, Scalar] = recipe({}, "Arguments of the preprocessor, e.g. name and author.")
    limit: Annotated[int, Field(ge=1)] | None = recipe(None, "Take only this many rows, from the start.")
    held_out: Annotated[float, Field(ge=0, lt=1)] = recipe(0.1, "Share of the rows kept for evaluation, chosen by content hash.")
    weight: Annotated[float, Field(gt=0)] = recipe(1.0, "Share of this source in a mix 'weighted', relative to the others.")


class DataConfig(Config):
    """What is learnt from, and what is kept for evaluation."""

    sources: tuple[SourceConfig, ...] = recipe(doc="Sources, mixed in this order.", min_length=1)
    filters: tuple[FilterConfig, ...] = recipe((), "Filters that each trajectory has to pass, in this order.")
    dedup: Literal["none", "exact", "minhash"] = recipe(
        "none", "Leave out trajectories with the same messages as an earlier one, or nearly the same (MinHash)."
    )
    dedup_similarity: float = recipe(0.9, "Jaccard similarity of word 5-grams from which MinHash calls two the same.", gt=0, le=1)
    mix: Literal["concatenate", "interleave", "weighted"] = recipe(
        "concatenate",
        "Order of the sources: one after the other; in turns until all are used; or in turns by weight, until the first is used up.",
    )
    split_seed: int = recipe(0, "Changes which rows are held out.")
    on_bad_row: Literal["raise", "skip"] = recipe("raise", "A row that cannot be converted ends the run, or is counted and listed.")

    @model_validator(mode="after")
    def names_are_unique(self) -> DataConfig:
        names = [source.name for source in self.sources]
        if len(set(names)) != len(names):
            raise ValueError(f"source names must differ, got {names}")
        return self


class TemplateConfig(Config):
    """How a trajectory becomes tokens and labels."""

    name: str = recipe("Template", "Template class, e.g. Template or Qwen3_5Template.")
    chat_template: str | None = recipe(None, "Jinja chat template that replaces the tokenizer's own.")
    default_system: str | None = recipe(None, "System message for conversations that have none.")
    enable_thinking: bool | None = recipe(None, "Handed to the chat template as enable_thinking; null hands nothing.")
    max_length: int = recipe(1024, "Longest document, in tokens.", ge=2)
    truncation: Literal["raise", "delete", "left", "right", "split"] = recipe(
        "raise", "For longer documents: end the run, drop and count, cut a side and count, or cut into several documents."
    )
    learn: Literal["assistant", "last_turn", "all"] = recipe(
        "assistant", "What carries loss: the assistant's turns, its last turn, or prompts too. A turn's own loss_weight goes before."
    )
    on_bad_row: Literal["raise", "skip"] = recipe("raise", "A row that cannot be encoded ends the run, or is counted and listed.")
    num_proc: Annotated[int, Field(ge=1)] | None = resource(None, "Encoding processes; null takes all cores. Never changes the output.")


class PackingConfig(Config):
    """How documents fill rows."""

    row_length: int = recipe(1024, "Capacity of a row, in tokens.", ge=2)
    algorithm: Literal["best_fit_decreasing", "none"] = recipe("best_fit_decreasing", "`none` puts one sample into a row.")
    window_samples: Annotated[int, Field(ge=1)] | None = recipe(None, "Pack this many samples at a time, as a stream would; null: all.")


class ShardConfig(Config):
    """How rows are cut into files."""

    rows_per_shard: int = recipe(4096, "Rows in one Arrow file.", ge=1)


class LoraConfig(Config):
    """Low-rank adapter (https://arxiv.org/abs/2106.09685), through peft."""

    rank: int = recipe(16, "Rank r of the two factors.", ge=1)
    alpha: float = recipe(32.0, "The update is scaled by alpha / rank.", gt=0)
    dropout: float = recipe(0.0, "Dropout before the first factor.", ge=0, lt=1)
    target_modules: str | tuple[str, ...] = recipe("all-linear", "Modules to adapt: all-linear, or names.")


class TrainConfig(Config):
    """Supervised fine-tuning."""

    lora: LoraConfig | None = recipe(LoraConfig(), "Adapter settings; null trains all parameters.")
    epochs: int = recipe(1, "Passes over the rows.", ge=1)
    batch_size: int = recipe(8, "Packed rows per optimizer step, over all workers.", ge=1)
    micro_batch_size: int = recipe(1, "Packed rows per forward pass; dropout is drawn per micro-batch, so it is part of the recipe.", ge=1)
    lr: float = recipe(1e-4, "Peak learning rate.", gt=0)
    weight_decay: float = recipe(0.0, "AdamW's decoupled weight decay.", ge=0)
    schedule: Literal["cosine", "linear", "constant"] = recipe("cosine", "Learning rate after warm-up, over optimizer steps.")
    warmup_ratio: float = recipe(0.05, "Share of the optimizer steps spent warming up.", ge=0, lt=1)
    max_grad_norm: float = recipe(1.0, "Gradients are scaled down to this global L2 norm.", gt=0)
    mixed_precision: Literal["no", "bf16"] = recipe("no", "Compute type; what is trained keeps float32 values.")
    deterministic: bool = recipe(
        True, "On a GPU, use kernels that give the same bits each time, so that a resumed run is equal to the bit; false is faster."
    )
    activation_checkpointing: Literal["none", "selective", "full"] = resource(
        "none", "Compute layers' activations again in the backward pass instead of keeping them: all but products and attention, or all."
    )
    shuffle: bool = recipe(True, "Draw a new order of the rows for each epoch.")
    shuffle_shards: int = recipe(
        256, "Rows are shuffled among this many shards at a time; shards are drawn at random. Bounds what a remote reader caches.", ge=1
    )
    seed: int = recipe(42, "Seed of order, adapter initialisation and dropout.", ge=0, lt=2**63)

    @model_validator(mode="after")
    def micro_batch_fits_batch(self) -> TrainConfig:
        if self.batch_size % self.micro_batch_size:
            raise ValueError(f"batch_size {self.batch_size} is not a multiple of micro_batch_size {self.micro_batch_size}")
        return self


class ExportConfig(Config):
    """The model folder that is published."""

    form: Literal["merged", "adapter"] = recipe("merged", "A whole model that loads by itself, or the adapter alone.")
    dtype: Literal["float32", "bfloat16", "float16"] = recipe("bfloat16", "Type of the stored weights; merging is done in float32.")


class EvaluateConfig(Config):
    """What is measured on held-out rows, before and after."""

    max_samples: int = recipe(64, "Held-out conversations that get a generated answer.", ge=0)
    max_new_tokens: int = recipe(48, "Longest generated answer, in tokens.", ge=1)
    probes: tuple[str, ...] = recipe((), "Questions whose answers before and after are shown in the report.")


class PublishConfig(Config):
    """Where the model goes, and what the report must show for that."""

    name: str = recipe("model", "Name of the release.", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    target: str | None = recipe(None, "Folder or s3:// prefix for releases; null means releases/ in the store.")
    max_loss_increase: float = recipe(0.0, "Gate: held-out loss after minus before may be at most this, in nats per token.")
    min_accuracy: float | None = recipe(None, "Gate: held-out answer accuracy must reach this.", ge=0, le=1)


class CheckpointConfig(Config):
    """When training is saved, and what is kept. Never changes the result."""

    save_every: int = resource(20, "Optimizer steps between checkpoints; the last step is always saved.", ge=1)
    keep_last: int = resource(2, "Newest checkpoints kept.", ge=1)
    keep_every: int | None = resource(None, "Also keep each checkpoint whose step is a multiple of this.", ge=1)


class ResourcesConfig(Config):
    """Where it runs. Nothing here changes what comes out (but see docs/resume.md on worker and thread counts and float order)."""

    mode: Literal["ray", "local"] = resource("ray", "Train in a group of Ray actors, or in this process.")
    workers: int = resource(1, "Training workers. Each has rows of its own, but for those that share them along cp, tp or ulysses.", ge=1)
    fsdp: int = resource(1, "Workers that each parameter is sharded over (FSDP2).", ge=1)
    tp: int = resource(1, "Workers that each layer is split over (tensor parallel), with LoRA's matrices.", ge=1)
    cp: int = resource(1, "Workers that a packed row is cut over, as a ring (context parallel).", ge=1)
    ulysses: int = resource(1, "Workers, out of the others, that a packed row is cut over, exchanging heads.", ge=1)
    ep: int = resource(1, "Workers, out of the others, that the experts of a layer are spread over.", ge=1)
    cpu_offload: bool = resource(False, "With fsdp: shards and optimizer state live in the CPU's memory.")
    memory_efficient_init: bool = resource(False, "Each worker reads only its own part of the base model, where parts there are.")
    cpus_per_worker: int = resource(1, "CPU cores and torch threads of a worker.", ge=1)
    gpus_per_worker: float = resource(0, "GPUs of a worker.", ge=0)
    ray_address: str | None = resource(None, "Running Ray cluster; null starts a local one.")
    shard_cache_bytes: int = resource(32 << 30, "Most disk space of the local cache of remote shards.", ge=1 << 20)
    max_restarts: int = resource(3, "Times a lost worker group is rebuilt inside the task.", ge=0)
    placement_timeout_seconds: float = resource(120.0, "How long to wait for the workers' cores and GPUs.", gt=0)

    @model_validator(mode="after")
    def local_mode_is_one_worker(self) -> ResourcesConfig:
        if self.mode == "local" and self.workers != 1:
            raise ValueError(f"mode 'local' runs one worker, got workers={self.workers}; use mode 'ray'")
        return self


def validate(config: type[BaseModel], values: Mapping[str, Any]) -> Any:
    """`values` as a `config`. Raises `ConfigError` naming each wrong key, its value and, for unknown keys, the nearest known one."""
    try:
        return config.model_validate(dict(values))
    except ValidationError as error:
        items = error.errors()
        inner = [item["loc"] for item in items]  # a list of refused items is called too short as well: only their own errors are told
        told = [item for item in items if not any(len(loc) > len(item["loc"]) and loc[: len(item["loc"])] == item["loc"] for loc in inner)]
        raise ConfigError("\n".join(_describe(config, item) for item in told)) from None


def _describe(config: type[BaseModel], item: Any) -> str:
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        known = _known_keys(config, item["loc"][:-1])
        near = difflib.get_close_matches(str(item["loc"][-1]), known, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"known keys here: {', '.join(known)}"
        return f"unknown key '{key}': {hint}"
    if item["type"] == "missing":
        return f"'{key}' is missing and has no default"
    return (
        f"'{key}' is {item['input']!r}: {item['msg'].removeprefix('Value error, ')}" if key else item["msg"].removeprefix("Value error, ")
    )


def _known_keys(config: type[BaseModel], loc: tuple[Any, ...]) -> list[str]:
    current: Any = config
    for part in loc:
        if isinstance(part, int):
            continue
        annotation = current.model_fields[part].annotation
        current = next((a for a in _walk_types(annotation) if isinstance(a, type) and issubclass(a, BaseModel)), None)
        if current is None:
            return []
    return list(current.model_fields)


def _walk_types(annotation: Any) -> list[Any]:
    inner = getattr(annotation, "__args__", ())
    return [annotation, *(found for arg in inner for found in _walk_types(arg))]

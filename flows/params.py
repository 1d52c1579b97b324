"""The typed form of each flow: what a user may ask for. Light: pydantic only."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from twinkle_core.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvaluateConfig,
    ExportConfig,
    ModelConfig,
    PackingConfig,
    PublishConfig,
    ResourcesConfig,
    ShardConfig,
    TemplateConfig,
    TrainConfig,
    recipe,
    resource,
)
from twinkle_core.errors import ConfigError
from twinkle_core.trainer.mesh import check_resources


class PrepareParams(Config):
    """Data only: from rows to shards that a training can read."""

    model: ModelConfig = recipe(doc="The base model.")
    data: DataConfig = recipe(doc="What is learnt from, and what is kept for evaluation.")
    template: TemplateConfig = recipe(TemplateConfig(), "How a conversation becomes tokens and labels.")
    packing: PackingConfig = recipe(PackingConfig(), "How documents fill rows.")
    shard: ShardConfig = recipe(ShardConfig(), "How rows are cut into files.")

    @model_validator(mode="after")
    def longest_document_fits_a_row(self) -> Self:
        if self.packing.row_length < self.template.max_length:
            raise ValueError(
                f"packing.row_length {self.packing.row_length} is less than template.max_length {self.template.max_length}: "
                f"with truncation '{self.template.truncation}' documents longer than a row remain; raise the first or lower the second"
            )
        return self

    @model_validator(mode="after")
    def processors_and_their_arguments_go_together(self) -> Self:
        for index, source in enumerate(self.data.sources):
            where = f"data.sources.{index}"
            if source.processor is None and source.processor_args:
                raise ValueError(f"{where}.processor_args {sorted(source.processor_args)} given, but {where}.processor is null")
            if source.uri == "builtin://self_cognition" and source.processor is None:
                raise ValueError(
                    f"{where}.uri {source.uri} has a name and an author to fill in; set {where}.processor SelfCognitionProcessor"
                )
        return self


class SFTParams(PrepareParams):
    """Supervised fine-tuning: from rows to a published model."""

    train: TrainConfig = recipe(TrainConfig(), "Optimizer, adapter and schedule.")
    export: ExportConfig = recipe(ExportConfig(), "The model folder that is published.")
    evaluate: EvaluateConfig = recipe(EvaluateConfig(), "What is measured on held-out rows, before and after.")
    publish: PublishConfig = recipe(PublishConfig(), "Where the model goes, and what the report must show for that.")
    checkpoint: CheckpointConfig = resource(CheckpointConfig(), "When training is saved, and what is kept.")
    resources: ResourcesConfig = resource(ResourcesConfig(), "Where it runs.")

    @model_validator(mode="after")
    def adapter_export_needs_an_adapter(self) -> SFTParams:
        if self.export.form == "adapter" and self.train.lora is None:
            raise ValueError("export.form 'adapter' needs an adapter, but train.lora is null; use export.form 'merged'")
        return self

    @model_validator(mode="after")
    def gate_can_be_measured(self) -> SFTParams:
        if all(source.held_out == 0 for source in self.data.sources):
            raise ValueError("every source has held_out 0: the release gate needs held-out rows; set data.sources.0.held_out, e.g. 0.1")
        if self.publish.min_accuracy is not None and self.evaluate.max_samples == 0:
            raise ValueError(
                f"publish.min_accuracy {self.publish.min_accuracy} needs generated answers, but evaluate.max_samples is 0; set one or null"
            )
        return self

    @model_validator(mode="after")
    def ray_address_needs_ray(self) -> SFTParams:
        if self.resources.mode == "local" and self.resources.ray_address is not None:
            raise ValueError(f"resources.ray_address {self.resources.ray_address} is given, but resources.mode is 'local'; use mode 'ray'")
        return self

    @model_validator(mode="after")
    def model_can_be_spread_so(self) -> SFTParams:
        try:
            check_resources(self.resources, self.train)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return self


FLOWS: dict[str, type[PrepareParams]] = {"sft": SFTParams, "prepare": PrepareParams}
"""Each flow's form, by the name that `twinkle run NAME` takes."""

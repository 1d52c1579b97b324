"""The base model and its tokenizer as inputs of stages: known by content, never by where they lie."""

from __future__ import annotations

from storage.artifact import SourceRef
from tasks.context import Context
from twinkle_core.config import ModelConfig
from twinkle_core.hub.resolve import ModelSource, resolve_model


def resolve(context: Context, model: ModelConfig) -> ModelSource:
    """Where the base model is and what its bytes are; nothing is converted yet."""
    return resolve_model(model.source, context.cache)


def weights_ref(base: ModelSource) -> SourceRef:
    """Weights and config, for stages that compute with them."""
    return SourceRef(name=base.name, uri=base.name, digest=base.digest)


def tokenizer_ref(base: ModelSource) -> SourceRef:
    """Tokenizer files and chat template, for stages that only need ids."""
    return SourceRef(name=f"{base.name} tokenizer", uri=base.name, digest=base.tokenizer_digest)

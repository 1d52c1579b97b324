"""From a checkpoint's weights to a model folder that anybody can load. Imports torch.

`merged`: the base model with the adapter multiplied in, in float32, then cast once; or all trained parameters, cast.
`adapter`: peft's folder, with the tokenizer beside it. Neither holds a local path, and both are read back before they count.
The folder appears whole or not at all.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from twinkle_core.checkpoint.export_files import GENERATION_FILE, copy_tokenizer, generation_settings, refuse_local_paths
from twinkle_core.config import ExportConfig
from twinkle_core.errors import ConfigError, DamagedError, DataError
from twinkle_core.model.adapter import refuse_untrained
from twinkle_core.model.base_config import load_config
from twinkle_core.model.checkpoint_files import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    MODEL_FILE,
    check_tensors,
    read_json,
    read_tensors,
    write_json,
)
from twinkle_core.model.trained_weights import adapter_folder, is_adapter, read_trained

SHARD_BYTES = 5_000_000_000
"""A weights file is cut above this size, and an index says which tensor is where."""


def export(
    base_folder: Path,
    weights_folder: Path,
    export: ExportConfig,
    out: Path,
    *,
    base_name: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> dict[str, Any]:
    """Writes the model folder `out` (new or empty) from the base model and a checkpoint's weights. Gives a summary of plain numbers.

    `base_name` is the base model's public name, for the adapter's config. Nothing is written before everything fits: raises
    `DataError` for weights that do not fit the base, `TrainingError` for an adapter that learnt nothing, `ConfigError` for a form
    or type that cannot hold the weights; and `DamagedError` when what was written reads back differently.
    """
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty; export writes into a new folder")
    load_config(base_folder)
    generation = generation_settings(base_folder)
    weights = read_trained(weights_folder)
    _refuse_not_finite(weights, str(weights_folder))
    if is_adapter(weights_folder):
        refuse_untrained(weights)
    elif export.form == "adapter":
        raise ConfigError("form is 'adapter', but all parameters were trained: use form 'merged'")
    model = _load(base_folder, torch.float32)
    if is_adapter(weights_folder):
        wrapped = _with_adapter(model, weights_folder, weights)
        if export.form == "merged":
            _refuse_tied(model, weights)
            model = wrapped.merge_and_unload()
    else:
        _take(model, weights, weights_folder / MODEL_FILE)
    out = out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
        draft = Path(scratch) / out.name
        draft.mkdir()
        if export.form == "adapter":
            num_parameters = _write_adapter(weights_folder, weights, export, draft, base_name)
        else:
            num_parameters = _write_merged(model, export, draft, generation, shard_bytes)
        copy_tokenizer(base_folder, draft)
        if generation is not None:
            write_json(draft / GENERATION_FILE, generation)
        refuse_local_paths(draft, (base_folder, weights_folder, out, draft))
        draft.rename(out)
    files = sorted(path.name for path in out.iterdir())
    size = sum(path.stat().st_size for path in out.iterdir())
    return {"form": export.form, "dtype": export.dtype, "num_parameters": num_parameters, "num_bytes": size, "files": files}


def _load(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, trust_remote_code=False, local_files_only=True, output_loading_info=True
    )
    model: PreTrainedModel = loaded[0]
    info: dict[str, Any] = loaded[1]
    wrong = {key: sorted(map(str, names)) for key, names in info.items() if names and key != "error_msgs"}
    if wrong:
        raise DamagedError(f"weights in {folder} do not fit its config: {wrong}")
    model.eval()
    return model


def _take(model: PreTrainedModel, weights: Mapping[str, torch.Tensor], source: Path) -> None:
    """Puts all trained parameters in. Raises `DataError` naming tensors that do not fit."""
    parameters = dict(model.named_parameters())
    check_tensors(weights, parameters, source)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])


def _write_merged(model: PreTrainedModel, export: ExportConfig, out: Path, generation: dict[str, Any] | None, shard_bytes: int) -> int:
    dtype = getattr(torch, export.dtype)
    _cast(model, dtype)
    _refuse_not_finite(dict(model.named_parameters()), f"the model as {export.dtype}")
    for name in ("auto_map", "quantization_config"):
        if hasattr(model.config, name):
            delattr(model.config, name)
    model.config.tie_word_embeddings = _is_tied(model)
    model.config.use_cache = True
    if generation is not None:
        model.generation_config = GenerationConfig.from_dict(generation)
    model.save_pretrained(out, max_shard_size=shard_bytes)
    _check_same(model, _load(out, dtype), out)
    return sum(parameter.numel() for parameter in model.parameters())


def _cast(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Casts all but what the model's code keeps in float32 whatever type it is loaded in, e.g. the bias of DeepSeek-V3's router."""
    kept = set(model._keep_in_fp32_modules_strict or ()) if dtype != torch.float32 else set()
    kept |= set(model._keep_in_fp32_modules or ()) if dtype == torch.float16 else set()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_floating_point() and not kept & set(name.split(".")):
                tensor.data = tensor.data.to(dtype)


def _write_adapter(
    weights_folder: Path, weights: Mapping[str, torch.Tensor], export: ExportConfig, out: Path, base_name: str | None
) -> int:
    cast = {name: tensor.to(getattr(torch, export.dtype)) for name, tensor in weights.items()}
    _refuse_not_finite(cast, f"the adapter as {export.dtype}")
    save_file(cast, out / ADAPTER_FILE, {"format": "pt"})
    settings = read_json(weights_folder / ADAPTER_CONFIG_FILE)
    write_json(out / ADAPTER_CONFIG_FILE, settings | {"base_model_name_or_path": base_name})
    read = read_tensors(out / ADAPTER_FILE)
    different = [name for name in cast.keys() | read.keys() if name not in read or not _same(cast[name], read[name])]
    if different:
        raise DamagedError(f"{out / ADAPTER_FILE} reads back with other values in {sorted(different)[:5]}")
    return sum(tensor.numel() for tensor in cast.values())


def _with_adapter(model: PreTrainedModel, folder: Path, weights: Mapping[str, torch.Tensor]) -> peft.PeftModel:
    """`model` with the adapter of `folder`, every tensor of which must have found its place, and no other."""
    with adapter_folder(folder, weights) as pefts:
        wrapped = peft.PeftModel.from_pretrained(model, pefts, low_cpu_mem_usage=False)
    there = peft.get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    given = {name: tensor.to(torch.float32) for name, tensor in weights.items()}
    check_tensors(given, {name: tensor.to(torch.float32) for name, tensor in there.items()}, folder / ADAPTER_FILE)
    different = [name for name in given if not torch.equal(given[name], there[name].to(torch.float32))]
    if different:
        raise DataError(f"peft did not load {different[:5]} of {folder / ADAPTER_FILE} as they are")
    return wrapped


def _is_tied(model: PreTrainedModel) -> bool:
    """Whether one matrix reads and predicts. The config may say so while the files hold two that differ, and are then kept apart."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def _refuse_tied(model: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> None:
    """`model` with its adapter in; the names in `weights` are those of its modules."""
    if _is_tied(model):
        ends = (model.get_output_embeddings(), model.get_input_embeddings())
        names = [name for name, module in model.named_modules() if any(module is end for end in ends)]
        touched = sorted(tensor for tensor in weights if any(f".{name}." in tensor for name in names))
        if touched:
            raise ConfigError(
                f"the adapter changes {touched[:3]}, but one matrix reads and predicts in this model (tied embeddings): "
                "merging would change both; train it without these modules, or untie the base model first"
            )


def _refuse_not_finite(tensors: Mapping[str, torch.Tensor], where: str) -> None:
    wrong = [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]
    if wrong:
        raise DataError(f"{where} holds values that are not finite in {wrong[:5]}; use another checkpoint, or a dtype that holds them")


def _check_same(written: PreTrainedModel, read: PreTrainedModel, folder: Path) -> None:
    expected, found = written.state_dict(), read.state_dict()
    different = [name for name in expected.keys() & found.keys() if not _same(expected[name], found[name])]
    different += expected.keys() ^ found.keys()
    if different:
        raise DamagedError(f"{folder} reads back with other values in {sorted(different)[:5]}")


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)

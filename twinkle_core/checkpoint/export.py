"""From a checkpoint's weights to a model folder that anybody can load. Imports torch.

`merged`: the base model with the adapter multiplied in, in float32, then cast once; or all trained parameters, cast.
`adapter`: peft's folder, with the tokenizer beside it. Neither holds a local path, and both are read back before they count.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from twinkle_core.config import ExportConfig
from twinkle_core.errors import ConfigError, DamagedError, DataError
from twinkle_core.model.adapter import refuse_untrained
from twinkle_core.model.checkpoint_files import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    MODEL_FILE,
    check_tensors,
    read_json,
    read_tensors,
    write_json,
)
from twinkle_core.model.loading import refuse_quantized

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.json",
    "chat_template.jinja",
)
GENERATION_FILE = "generation_config.json"
PATH_KEYS = ("_name_or_path", "name_or_path", "base_model_name_or_path", "tokenizer_file", "vocab_file")


def export(base_folder: Path, weights_folder: Path, export: ExportConfig, out: Path, *, base_name: str | None = None) -> dict[str, Any]:
    """Writes the model folder `out` (new or empty) from the base model and a checkpoint's weights. Gives a summary of plain numbers.

    `base_name` is the base model's public name, for the adapter's config. Raises `DataError` for weights that do not
    fit the base, `TrainingError` for an adapter that learnt nothing, `DamagedError` when what was written reads back differently.
    """
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty; export writes into a new folder")
    out.mkdir(parents=True, exist_ok=True)
    refuse_quantized(AutoConfig.from_pretrained(base_folder, trust_remote_code=False, local_files_only=True), base_folder)
    is_adapter = (weights_folder / ADAPTER_FILE).exists()
    weights = read_tensors(weights_folder / (ADAPTER_FILE if is_adapter else MODEL_FILE))
    if is_adapter:
        refuse_untrained(weights)
    if export.form == "adapter":
        if not is_adapter:
            raise ConfigError("form is 'adapter', but all parameters were trained: use form 'merged'")
        num_parameters = _write_adapter(base_folder, weights_folder, weights, export, out, base_name)
    else:
        num_parameters = _write_merged(base_folder, weights_folder, weights if not is_adapter else None, export, out)
    _copy_tokenizer(base_folder, out)
    _refuse_local_paths(out, (base_folder, weights_folder, out))
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


def _write_merged(
    base_folder: Path, weights_folder: Path, weights: Mapping[str, torch.Tensor] | None, export: ExportConfig, out: Path
) -> int:
    model = _load(base_folder, torch.float32)
    if weights is None:
        model = _with_adapter(model, weights_folder).merge_and_unload(safe_merge=True)
    else:
        parameters = dict(model.named_parameters())
        check_tensors(weights, parameters, weights_folder / MODEL_FILE)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(weights[name])
    dtype = getattr(torch, export.dtype)
    model = model.to(dtype)
    model.config.use_cache = True
    model.save_pretrained(out)
    _check_same(model, _load(out, dtype), out)
    return sum(parameter.numel() for parameter in model.parameters())


def _write_adapter(
    base_folder: Path, weights_folder: Path, weights: dict[str, torch.Tensor], export: ExportConfig, out: Path, base_name: str | None
) -> int:
    from safetensors.torch import save_file

    cast = {name: tensor.to(getattr(torch, export.dtype)) for name, tensor in weights.items()}
    save_file(cast, out / ADAPTER_FILE, {"format": "pt"})
    settings = read_json(weights_folder / ADAPTER_CONFIG_FILE)
    write_json(out / ADAPTER_CONFIG_FILE, settings | {"base_model_name_or_path": base_name})
    _with_adapter(_load(base_folder, torch.float32), out)
    return sum(tensor.numel() for tensor in cast.values())


def _with_adapter(model: PreTrainedModel, folder: Path) -> peft.PeftModel:
    """`model` with the adapter of `folder`, every tensor of which must have found its place, and no other."""
    wrapped = peft.PeftModel.from_pretrained(model, folder, low_cpu_mem_usage=False)
    there = peft.get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    given = {name: tensor.to(torch.float32) for name, tensor in read_tensors(folder / ADAPTER_FILE).items()}
    check_tensors(given, {name: tensor.to(torch.float32) for name, tensor in there.items()}, folder / ADAPTER_FILE)
    different = [name for name in given if not torch.equal(given[name], there[name].to(torch.float32))]
    if different:
        raise DataError(f"peft did not load {different[:5]} of {folder / ADAPTER_FILE} as they are")
    return wrapped


def _check_same(written: PreTrainedModel, read: PreTrainedModel, folder: Path) -> None:
    expected, found = written.state_dict(), read.state_dict()
    different = [name for name in expected.keys() & found.keys() if not torch.equal(expected[name], found[name])]
    different += expected.keys() ^ found.keys()
    if different:
        raise DamagedError(f"{folder} reads back with other values in {sorted(different)[:5]}")


def _copy_tokenizer(base_folder: Path, out: Path) -> None:
    """Tokenizer, chat templates and generation settings, byte for byte but for keys that hold a path."""
    names = [name for name in (*TOKENIZER_FILES, GENERATION_FILE) if (base_folder / name).is_file()]
    templates = base_folder / "additional_chat_templates"
    for name in names:
        shutil.copyfile(base_folder / name, out / name)
    if templates.is_dir():
        shutil.copytree(templates, out / templates.name)
    for path in out.glob("*config.json"):
        settings = json.loads(path.read_text())
        paths = [key for key in PATH_KEYS if isinstance(settings.get(key), str) and Path(settings[key]).is_absolute()]
        if paths:
            write_json(path, {key: value for key, value in settings.items() if key not in paths})


def _refuse_local_paths(out: Path, folders: tuple[Path, ...]) -> None:
    known = {str(form) for folder in folders for form in (folder.absolute(), folder.resolve())}
    for path in sorted(out.rglob("*")):
        if path.suffix in (".json", ".jinja", ".txt", ".md") and path.is_file():
            text = path.read_text()
            found = [folder for folder in known if len(folder) > 1 and folder in text]
            if found:
                raise DataError(f"{path} holds the local path {found[0]}, which must not be published; remove it there")

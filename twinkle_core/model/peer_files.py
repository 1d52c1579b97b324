"""Reading checkpoints, ours and those of peers: HF Trainer and PEFT folders, Twinkle's `save` folders. Imports torch.

Peers pickle their optimizer state (`optimizer.pt`). It is read only as far as torch's restricted unpickler takes it, which
builds tensors and plain values and runs no code; what that refuses is refused here.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from twinkle_core.errors import ConfigError, DataError
from twinkle_core.model import checkpoint_files as files
from twinkle_core.model.adapter_state import AdapterState
from twinkle_core.model.trained_weights import INDEX_FILE, read_cut_file

PICKLED_WEIGHTS = ("adapter_model.bin", "pytorch_model.bin", "pytorch_model.bin.index.json")
OPTIMIZER_PICKLE = "optimizer.pt"
LORA_SETTINGS = ("r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "target_parameters")
"""Settings of an adapter that decide what its tensors mean."""


@dataclass(frozen=True, kw_only=True)
class PeerState:
    """The training state of a peer's folder, in our form."""

    training: dict[str, Any]
    optimizer: dict[str, torch.Tensor]


def adapter_settings(source: Path | Mapping[str, Any]) -> dict[str, Any] | None:
    """The settings of `LORA_SETTINGS`, of an adapter's own or of the folder it was saved in; None where that has none."""
    if isinstance(source, Path):
        path = source / files.ADAPTER_CONFIG_FILE
        if not path.exists():
            return None
        source = files.read_json(path)
    return {name: source.get(name) or None for name in LORA_SETTINGS}


def read_weights(folder: Path, state: AdapterState, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The trained tensors that a folder holds, whole, checked and in the trained type.

    Raises `DamagedError` for files that cannot be read, `DataError` for tensors that do not fit, or are in a pickle.
    """
    name = files.weights_file(state.adapter is not None)
    if not (folder / name).exists():
        pickled = [other for other in PICKLED_WEIGHTS if (folder / other).exists()]
        if pickled:
            raise DataError(f"{folder / pickled[0]} is a pickle, which may run code: save the weights as safetensors ({name})")
    found = read_cut_file(folder) if state.adapter is None and (folder / INDEX_FILE).exists() else files.read_tensors(folder / name)
    found = _without_tied(found, state, model)
    whole = state.weights()
    found = {key: tensor.to(torch.float32) if tensor.is_floating_point() and key in whole else tensor for key, tensor in found.items()}
    files.check_tensors(found, whole, folder / name)
    if state.adapter is not None and not any(bool(tensor.any()) for tensor in found.values()):
        raise DataError(f"all {len(found)} tensors of {folder / name} are zero: it is no adapter")
    return found


def peer_state(folder: Path, state: AdapterState) -> PeerState | None:
    """The optimizer state of HF Trainer's or Twinkle's folder; None where there is none.

    Left out: random states (pickled objects of numpy and Python), the scheduler's (ours follows from the step).
    """
    path = folder / OPTIMIZER_PICKLE
    if not path.exists():
        return None
    if not state.ready()[0].is_preset:
        raise ConfigError(f"{path} can be taken over into 'AdamW' only")
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        left = "load the weights alone: optimizer moments, step and schedule are left out then"
        raise DataError(f"{path} is a pickle that holds more than tensors ({str(error).splitlines()[0][:120]}); {left}") from error
    names = _in_order(state, saved)
    tensors: dict[str, torch.Tensor] = {}
    for number, name in enumerate(names):
        entry = saved["state"].get(number, {})
        missing = {"step", "exp_avg", "exp_avg_sq"} - entry.keys()
        if missing:
            raise DataError(f"{path} has no {', '.join(sorted(missing))} for parameter {number} ({name}): it is no AdamW's state")
        for key in ("step", "exp_avg", "exp_avg_sq"):
            tensors[f"{name}.{key}"] = torch.as_tensor(entry[key]).to(torch.float32)
    files.check_tensors(tensors, state.ready()[0].room(None), path)
    steps = {int(tensors[f"{name}.step"]) for name in names}
    if len(steps) != 1:
        raise DataError(f"{path} has parameters that took different numbers of steps ({sorted(steps)}): it cannot be resumed")
    return PeerState(training={"cur_step": steps.pop()}, optimizer=tensors)


def _in_order(state: AdapterState, saved: Mapping[str, Any]) -> list[str]:
    """Names in the order of the saved numbers: the model's, or first those with weight decay (matrices) and then those without."""
    try:
        counts = [len(group["params"]) for group in saved["param_groups"]]
    except (KeyError, TypeError) as error:
        raise DataError(f"the saved optimizer has no param_groups ({error}): it is not torch's form") from error
    names = list(state.model_order)
    matrices = [name for name in names if state.parameters[name].ndim >= 2]
    vectors = [name for name in names if state.parameters[name].ndim < 2]
    if len(counts) == 2 and counts == [len(matrices), len(vectors)]:
        return matrices + vectors
    if sum(counts) != len(names) or len([count for count in counts if count]) != 1:
        raise DataError(f"the saved optimizer has groups of {counts} parameters; {len(names)} are trained here ({len(matrices)} matrices)")
    return names


def _without_tied(found: dict[str, torch.Tensor], state: AdapterState, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Without a second copy of a tied matrix; raises `DataError` where the copies differ, since one of them would be lost."""
    if state.adapter is not None:
        return found
    tied = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    kept = {identity: name for name, identity in tied.items() if name in state.parameters}
    for name in [name for name in found if name in tied and name not in state.parameters]:
        twin = kept[tied[name]]
        if twin in found and not torch.equal(found[name], found[twin]):
            raise DataError(f"{name} and {twin} are one matrix in this model, but two different ones in the checkpoint")
        other = found.pop(name)
        found.setdefault(twin, other)
    return found

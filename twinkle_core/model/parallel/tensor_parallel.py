"""Layers split over ranks, by the plan that transformers gives a model (`model.tp_plan`). Imports torch.

Megatron's form (https://arxiv.org/abs/1909.08053): a column-wise layer gives each rank some of its outputs, a row-wise one takes
them and sums what the ranks have. Activations between such pairs are the same on every rank, and so are the loss and the gradients
of parameters that are not split. The plans are transformers', the computation is ours: in theirs, what a backward pass adds to the
gradients of `replicated_with_grad_allreduce` is summed again with each later one of an accumulation.

LoRA's matrices follow their layer: beside a column-wise one B is split alike and A whole, beside a row-wise one A is split and B whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from peft.tuners.lora import LoraLayer
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import linear
from transformers import PreTrainedModel

from twinkle_core.errors import ConfigError

COLUMNS, ROWS, COPIES = "columns", "rows", "copies"
STYLES = {
    "colwise": (COLUMNS, False),
    "colwise_gather_output": (COLUMNS, True),
    "colwise_rep": (COLUMNS, True),
    "rowwise": (ROWS, False),
    "rowwise_split_input": (ROWS, True),
    "rowwise_rep": (ROWS, True),
    "replicated_with_grad_allreduce": (COPIES, False),
}
"""Name in a plan → how the layer is split, and whether its outer side is whole on every rank."""


class _Copy(torch.autograd.Function):
    """The same on every rank; gradients of the ranks are added up."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Sum(torch.autograd.Function):
    """Added up over ranks; each rank has the whole gradient already."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = value.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class _Join(torch.autograd.Function):
    """Parts of the last dimension, equal in size, made whole on every rank; each takes its part of the gradient."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _joined(part, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _own(grads[0], ctx.group), None


class _Own(torch.autograd.Function):
    """This rank's part of the last dimension; the parts of the gradient are made whole on every rank."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _own(whole, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _joined(grads[0], ctx.group), None


_copied: Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor] = _Copy.apply
_summed: Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor] = _Sum.apply
_made_whole: Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor] = _Join.apply
_taken: Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor] = _Own.apply


def _joined(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, dim=-1)


def _own(whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return whole.chunk(dist.get_world_size(group), dim=-1)[dist.get_rank(group)].contiguous()


def split_layers(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Changes `model` in place: parameters that its plan names become DTensors of `mesh`, and its layers compute on their parts.

    Embeddings, and a head that shares their matrix, stay whole. Raises `ConfigError` as `layers_to_split` does.
    """
    for _, module, style in layers_to_split(model, mesh.size()):
        _split(module, *STYLES[style], mesh)


def layers_to_split(model: PreTrainedModel, size: int) -> list[tuple[str, torch.nn.Module, str]]:
    """(Name, layer, style) of what is split over `size` ranks, LoRA's matrices included.

    Raises `ConfigError` for models without a plan, plans that ask for something else, sizes that do not divide, and adapters that need
    whole weights.
    """
    plan = dict(getattr(model, "tp_plan", None) or {})
    kind = model.config.model_type
    if not any("layers." in name for name in plan):  # some models have one for the head alone
        raise ConfigError(f"model type '{kind}' has no tensor-parallel plan in transformers: set tp_size to 1 and use fsdp_size")
    config = model.config.get_text_config()
    for what, number in (("attention heads", config.num_attention_heads), ("key-value heads", config.num_key_value_heads)):
        if number % size:
            raise ConfigError(f"tp_size {size} does not divide the {number} {what} of model type '{kind}'")
    embeddings: Any = model.get_input_embeddings()
    found = []
    for name, module in model.named_modules():
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style is None or getattr(module, "weight", None) is embeddings.weight:
            continue
        parts = _lora_parts(name, module, style) if isinstance(module, LoraLayer) else {name: module}
        for part_name, part in parts.items():
            if style not in STYLES or (STYLES[style][0] != COPIES and type(part) is not torch.nn.Linear):
                what = f"{part_name} ({type(part).__name__}) as {style!r}"
                raise ConfigError(f"the plan of '{kind}' has {what}; known: {', '.join(STYLES)}, of linear layers: use fsdp_size")
            _check_size(part_name, part, STYLES[style][0], size)
            found.append((part_name, part, style))
    return found


def _lora_parts(name: str, layer: LoraLayer, style: str) -> dict[str, torch.nn.Module]:
    """Of a layer with adapters, the linear layers that are split as the layer itself."""
    if layer.lora_variant or layer.lora_embedding_A:
        raise ConfigError(f"{name} has an adapter that needs whole weights (DoRA and the like), which tp_size splits: use fsdp_size")
    beside, letter = (layer.lora_B, "B") if STYLES.get(style, (ROWS, False))[0] == COLUMNS else (layer.lora_A, "A")
    return {f"{name}.base_layer": layer.get_base_layer()} | {f"{name}.lora_{letter}.{key}": part for key, part in beside.items()}


def _check_size(name: str, module: Any, how: str, size: int) -> None:
    dim = 0 if how == COLUMNS else 1
    if how != COPIES and module.weight.shape[dim] % size:
        raise ConfigError(f"tp_size {size} does not divide {name}, {list(module.weight.shape)}, along dimension {dim}")


def _split(module: Any, how: str, is_whole_outside: bool, mesh: DeviceMesh) -> None:
    group = mesh.get_group()
    if how == COPIES:
        module.forward = _with_copied_parameters(module, group)
        return
    dim = 0 if how == COLUMNS else 1
    module.weight = _part_of(module.weight, dim, mesh)
    if how == COLUMNS and module.bias is not None:
        module.bias = _part_of(module.bias, 0, mesh)

    def columns(inputs: torch.Tensor) -> torch.Tensor:
        out = linear(_copied(inputs, group), _local(module.weight), _local(module.bias))
        return _made_whole(out, group) if is_whole_outside else out

    def rows(inputs: torch.Tensor) -> torch.Tensor:
        out = linear(_taken(inputs, group) if is_whole_outside else inputs, _local(module.weight))
        total = _summed(out, group)
        return total if module.bias is None else total + module.bias

    module.forward = columns if how == COLUMNS else rows


def _local(parameter: Any) -> Any:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _part_of(parameter: torch.nn.Parameter, dim: int, mesh: DeviceMesh) -> torch.nn.Parameter:
    part = parameter.detach().chunk(mesh.size(), dim=dim)[mesh.get_local_rank()].contiguous().clone()
    parted = DTensor.from_local(part, mesh, [Shard(dim)], run_check=False, shape=parameter.shape, stride=parameter.stride())
    return torch.nn.Parameter(parted, requires_grad=parameter.requires_grad)


def _with_copied_parameters(module: torch.nn.Module, group: dist.ProcessGroup) -> Callable[..., Any]:
    """A forward of a module that sees some heads of each token: what the ranks find for its parameters is added up."""
    original = module.forward

    def forward(*args: Any) -> Any:
        copies = {name: _copied(value, group) for name, value in module.named_parameters(recurse=False)}
        module.__dict__.update(copies)  # found before the parameter of that name, for this call
        try:
            return original(*args)
        finally:
            for name in copies:
                del module.__dict__[name]

    return forward

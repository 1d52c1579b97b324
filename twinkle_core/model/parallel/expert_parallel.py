"""Experts spread over ranks, each token sent to its experts and back (GShard, https://arxiv.org/abs/2006.16668). Imports torch.

No token is dropped: the ranks tell each other how many tokens they send, then exchange exactly those. An expert without tokens computes
on none, so that every rank joins every exchange of the forward and the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import linear
from transformers import PreTrainedModel

from twinkle_core.errors import ConfigError

KNOWN = {"qwen3_moe": "Qwen3MoeExperts"}
"""Model type → class of its experts: `gate_up_proj` [E, 2I, H] and `down_proj` [E, H, I]."""


class _Exchange(torch.autograd.Function):
    """[n, H] -> [m, H]: `sent[i]` rows go to rank i of the group, `received[i]` come from it; gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        answer = rows.new_empty((sum(received), rows.shape[1]))
        dist.all_to_all_single(answer, rows.contiguous(), received, sent, group=group)
        return answer

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchanged(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None


_exchanged: Callable[[torch.Tensor, list[int], list[int], dist.ProcessGroup], torch.Tensor] = _Exchange.apply


def find_experts(model: PreTrainedModel, size: int) -> list[torch.nn.Module]:
    """All expert modules, to be spread over `size` ranks.

    Raises `ConfigError` for model types whose experts are not known here, numbers that do not divide, and experts that an adapter wraps.
    """
    kind = model.config.model_type
    if kind not in KNOWN:
        raise ConfigError(f"ep_size above 1 is known for model types {', '.join(KNOWN)}; this one is '{kind}': use fsdp_size")
    found = [module for module in model.modules() if type(module).__name__ == KNOWN[kind]]
    if not found or any("base_layer" in name and "experts" in name for name, _ in model.named_parameters()):
        raise ConfigError("ep_size above 1 needs experts that no adapter changes: leave target_parameters unset, or use fsdp_size")
    for module in found:
        if module.num_experts % size:  # type: ignore[operator]
            raise ConfigError(f"ep_size {size} does not divide the model's {module.num_experts} experts")
    return found


def spread_experts(model: PreTrainedModel, mesh: DeviceMesh) -> list[torch.nn.Module]:
    """Changes `model` in place: each rank of `mesh` keeps its share of each layer's experts. Gives the expert modules."""
    experts = find_experts(model, mesh.size())
    for module in experts:
        _spread(module, mesh)
    return experts


def _spread(module: Any, mesh: DeviceMesh) -> None:
    size, group = mesh.size(), mesh.get_group()
    num_own = module.num_experts // size
    for name in ("gate_up_proj", "down_proj"):
        whole = getattr(module, name)
        part = whole.detach()[mesh.get_local_rank() * num_own : (mesh.get_local_rank() + 1) * num_own].clone()
        parted = DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
        setattr(module, name, torch.nn.Parameter(parted, requires_grad=whole.requires_grad))

    def forward(hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """hidden [N, H], chosen [N, k] experts of each token, weights [N, k]; gives [N, H]."""
        numbers = chosen.reshape(-1)
        order = torch.argsort(numbers, stable=True)
        sent = torch.bincount(numbers, minlength=module.num_experts).view(size, num_own)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        to, back = sent.sum(dim=1).tolist(), received.sum(dim=1).tolist()
        arrived = _exchanged(hidden[order // chosen.shape[1]], to, back, group)
        owner = torch.arange(num_own, device=hidden.device).repeat(size).repeat_interleave(received.reshape(-1))
        by_expert = torch.argsort(owner, stable=True)
        done = _experts(module, arrived[by_expert], received.sum(dim=0).tolist())
        returned = _exchanged(done[torch.argsort(by_expert)], back, to, group)
        outputs = returned[torch.argsort(order)].view(*chosen.shape, -1)
        total: torch.Tensor = (outputs * weights[..., None]).sum(dim=1).to(hidden.dtype)
        return total

    module.forward = forward


def _experts(module: Any, tokens: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """[n, H]: each of this rank's experts on its consecutive tokens, `counts` of them."""
    gates, downs = (weight.to_local() if isinstance(weight, DTensor) else weight for weight in (module.gate_up_proj, module.down_proj))
    parts = []
    for index, part in enumerate(tokens.split(counts)):
        gate, up = linear(part, gates[index]).chunk(2, dim=-1)
        parts.append(linear(module.act_fn(gate) * up, downs[index]))
    return torch.cat(parts)

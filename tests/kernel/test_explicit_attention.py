"""Soft-capped logits and attention sinks, against numbers by hand and transformers' own code."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss

from twinkle_core.kernel import explicit_attention as module
from twinkle_core.kernel.explicit_attention import explicit_attention

HEADS, KEYS, LENGTH = 4, 2, 23


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scaling: float,
    dropout: float = 0.0,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    return explicit_attention(query, key, value, dropout, scaling, window, softcap, sinks)


def states(width: int = 8) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    parts = [torch.randn(1, heads, LENGTH, size) * 2 for heads, size in ((HEADS, 8), (KEYS, 8), (KEYS, width))]
    return parts[0].requires_grad_(), parts[1].requires_grad_(), parts[2].requires_grad_()


def mask(window: int | None) -> torch.Tensor:
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)[None, :]
    hidden = (distance < 0) | (distance >= (window or LENGTH))
    return torch.zeros(LENGTH, LENGTH).masked_fill(hidden, float("-inf"))[None, None]


def test_two_tokens_by_hand():
    """One head, logits 1 and 3. Capped at 2: 2 tanh(1/2) and 2 tanh(3/2). A sink of 0.5 takes its share and gives nothing."""
    query, key, value = torch.ones(1, 1, 2, 1), torch.tensor([1.0, 3.0]).view(1, 1, 2, 1), torch.tensor([10.0, 20.0]).view(1, 1, 2, 1)
    one, three = math.exp(2 * math.tanh(0.5)), math.exp(2 * math.tanh(1.5))
    capped = attend(query, key, value, scaling=1.0, softcap=2.0)[0, 0, :, 0]
    torch.testing.assert_close(capped, torch.tensor([10.0, (10 * one + 20 * three) / (one + three)]))
    one, three, sink = math.exp(1), math.exp(3), math.exp(0.5)
    sunk = attend(query, key, value, scaling=1.0, sinks=torch.tensor([0.5]))[0, 0, :, 0]
    torch.testing.assert_close(sunk, torch.tensor([10 * one / (one + sink), (10 * one + 20 * three) / (one + three + sink)]))
    windowed = attend(query, key, value, scaling=1.0, sinks=torch.tensor([0.5]), window=1)[0, 0, :, 0]
    torch.testing.assert_close(windowed, torch.tensor([10 * one / (one + sink), 20 * three / (three + sink)]))


@pytest.mark.parametrize("block", [4, 512])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kind", ["softcap", "sinks"])
def test_values_and_gradients_are_those_of_the_models_own_code(kind: str, window: int | None, block: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "QUERY_BLOCK", block)
    sinks = torch.tensor([0.3, -1.0, 2.0, 0.0], requires_grad=True)
    own: dict[str, Any]
    if kind == "softcap":
        eager, ours, own = modeling_gemma2.eager_attention_forward, {"softcap": 3.0}, {"softcap": 3.0}
        layer = SimpleNamespace(num_key_value_groups=HEADS // KEYS, training=True)
    else:
        eager, ours, own = modeling_gpt_oss.eager_attention_forward, {"sinks": sinks}, {}
        layer = SimpleNamespace(num_key_value_groups=HEADS // KEYS, training=True, sinks=sinks)
    weight = torch.randn(1, HEADS, LENGTH, 8)
    results = []
    for compute in (
        lambda q, k, v: attend(q, k, v, scaling=0.4, window=window, **ours),
        lambda q, k, v: eager(layer, q, k, v, mask(window), scaling=0.4, dropout=0.0, **own)[0].transpose(1, 2),
    ):
        parts = states()
        out = compute(*parts)
        learnt = (*parts, sinks) if kind == "sinks" else parts
        results.append((out, *torch.autograd.grad((out * weight).sum(), learnt)))
    for ours_is, theirs_is in zip(*results, strict=True):
        torch.testing.assert_close(ours_is, theirs_is, rtol=1e-5, atol=1e-5)


def test_values_may_be_narrower_than_keys_and_dropout_is_drawn():
    query, key, value = states(width=3)
    assert attend(query, key, value, scaling=0.4, softcap=3.0).shape == (1, HEADS, LENGTH, 3)
    torch.manual_seed(1)
    dropped = attend(query, key, torch.ones_like(value), scaling=0.4, softcap=3.0, dropout=0.5).detach()
    assert dropped.std() > 0.1 and abs(dropped.mean().item() - 1) < 0.2, "kept weights are scaled up by 1 / (1 - dropout)"

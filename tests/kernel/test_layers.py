import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from tests.model.tiny_models import SIZES
from twinkle_core.errors import ConfigError
from twinkle_core.kernel.layers import decoder_layers, prepare_layers
from twinkle_core.kernel.packed_attention import document_boundaries, register


def gradients(checkpointing: str) -> tuple[torch.Tensor, int]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**SIZES, head_dim=16, use_cache=False), attn_implementation=register()).train()
    calls = []
    decoder_layers(model)[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    prepare_layers(model, checkpointing=checkpointing)
    positions = torch.cat([torch.arange(4), torch.arange(7)])[None]
    model(
        input_ids=torch.arange(11)[None] + 5, position_ids=positions, **document_boundaries([4, 7], positions.device)
    ).logits.square().sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]), len(calls)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_checkpointing_recomputes_and_changes_no_bit(mode: str):
    plain, calls = gradients("none")
    again, more_calls = gradients(mode)
    assert (calls, more_calls) == (1, 2)
    assert torch.equal(plain, again)


def test_what_cannot_be_had_is_refused():
    model = AutoModelForCausalLM.from_config(Qwen3Config(**SIZES, head_dim=16))
    for wanted, why in (
        ({"checkpointing": "some"}, "known: none, selective, full"),
        ({"compiled": True, "checkpointing": "selective"}, "uncompiled"),
        ({"compiled": True}, "on a GPU, not on cpu"),
    ):
        with pytest.raises(ConfigError, match=why):
            prepare_layers(model, **wanted)

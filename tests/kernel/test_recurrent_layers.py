from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

from tests.families.families import save_family
from twinkle_core.kernel.recurrent_layers import split_by_document


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    """A gated delta net of Qwen3.5."""
    folder: Path = save_family("qwen3_5", tmp_path_factory.mktemp("qwen3_5"))
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert split_by_document(type(model), "qwen3_5_text") and split_by_document(type(model), "qwen3_5_text")
    return model.model.layers[0].linear_attn


def test_each_document_starts_from_nothing_and_without_lengths_it_is_one(layer: torch.nn.Module):
    torch.manual_seed(0)
    states = torch.randn(1, 12, 32)
    with torch.no_grad():
        parts = layer(states, seq_lens=[5, 1, 6]).split([5, 1, 6], dim=1)
        for part, alone in zip(parts, states.split([5, 1, 6], dim=1), strict=True):
            torch.testing.assert_close(part, layer(alone))
        bounds = torch.tensor([0, 5, 6, 12], dtype=torch.int32)
        torch.testing.assert_close(torch.cat(parts, dim=1), layer(states, cu_seq_lens=bounds, max_seq_len=128), rtol=0, atol=0)
        whole = layer(states)
        torch.testing.assert_close(whole, layer(states, seq_lens=[12]))
    assert (whole[:, 5:] - torch.cat(parts[1:], dim=1)).abs().max() > 0.01, "the check cannot see a leak"


def test_lengths_that_do_not_sum_to_the_row_and_other_models_change_nothing(layer: torch.nn.Module):
    with pytest.raises(RuntimeError, match="split_with_sizes"):
        layer(torch.zeros(1, 12, 32), seq_lens=[5, 6])
    forward = Qwen2ForCausalLM.forward
    assert not split_by_document(Qwen2ForCausalLM, "qwen2") and Qwen2ForCausalLM.forward is forward

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Gemma2ForCausalLM, PreTrainedModel

from tests.model.tiny_models import CONFIGS, VOCABULARY, save_model
from twinkle_core.errors import ConfigError, DataError
from twinkle_core.kernel import packed_attention as module
from twinkle_core.kernel.packed_attention import check_supported, packed_attention
from twinkle_core.model.loading import load_base

LENGTHS = {"A": 9, "B": 12, "C": 1, "D": 7}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_model(tmp_path_factory.mktemp(name), name) for name in CONFIGS}


def documents() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randint(3, VOCABULARY, (1, length), generator=generator) for name, length in LENGTHS.items()}


def packed_logits(model: PreTrainedModel, docs: list[torch.Tensor], embeddings: torch.Tensor | None = None) -> torch.Tensor:
    lengths = [doc.shape[1] for doc in docs]
    given = {"input_ids": torch.cat(docs, dim=1)} if embeddings is None else {"inputs_embeds": embeddings}
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return model(**given, position_ids=positions, seq_lens=lengths, use_cache=False).logits[0]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_document_in_a_pack_has_the_logits_it_has_alone_and_under_eager_attention(folders: dict[str, Path], name: str, training: bool):
    model = load_base(folders[name], torch.device("cpu")).train(training)
    eager = AutoModelForCausalLM.from_pretrained(folders[name], attn_implementation="eager", dtype=torch.float32).train(training)
    docs = documents()
    with torch.no_grad():
        parts = packed_logits(model, list(docs.values())).split(list(LENGTHS.values()))
        leaking = packed_logits(model, [torch.cat(list(docs.values()), dim=1)]).split(list(LENGTHS.values()))
        for part, doc in zip(parts, docs.values(), strict=True):
            torch.testing.assert_close(part, packed_logits(model, [doc]), rtol=0, atol=1e-5)
            torch.testing.assert_close(part, eager(input_ids=doc, use_cache=False).logits[0], rtol=0, atol=1e-5)
    assert (parts[1] - leaking[1]).abs().max() > 0.1, "the check cannot see a leak"


@pytest.mark.parametrize("name", CONFIGS)
def test_the_loss_of_one_document_has_exactly_no_gradient_on_another(folders: dict[str, Path], name: str):
    model = load_base(folders[name], torch.device("cpu"))
    docs = list(documents().values())
    embeddings = model.get_input_embeddings()(torch.cat(docs, dim=1)).detach().requires_grad_()
    start, stop = LENGTHS["A"], LENGTHS["A"] + LENGTHS["B"]
    packed_logits(model, docs, embeddings)[start:stop].square().sum().backward()
    assert embeddings.grad is not None
    outside = torch.cat([embeddings.grad[0, :start], embeddings.grad[0, stop:]])
    assert torch.count_nonzero(outside) == 0
    assert (embeddings.grad[0, start:stop].abs().amax(dim=-1) > 0).all()


@pytest.mark.parametrize(("length", "window", "block"), [(23, 5, 4), (23, 5, 512), (8, 8, 3), (9, 8, 3), (16, 1, 4)])
def test_a_sliding_window_in_blocks_is_the_dense_masked_product(length: int, window: int, block: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "WINDOW_BLOCK", block)
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, length, 8), torch.randn(1, 2, length, 8), torch.randn(1, 2, length, 8)
    out, _ = packed_attention(torch.nn.Module(), query, key, value, None, scaling=0.3, seq_lens=[length], sliding_window=window)
    distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    scores = (query @ key.repeat_interleave(2, dim=1).transpose(2, 3)) * 0.3
    weights = scores.masked_fill((distance < 0) | (distance >= window), float("-inf")).softmax(dim=-1)
    torch.testing.assert_close(out, (weights @ value.repeat_interleave(2, dim=1)).transpose(1, 2), rtol=1e-5, atol=1e-6)


def attend(**changes: object) -> None:
    states = torch.randn(1, 2, 6, 8)
    packed_attention(torch.nn.Module(), states, states, states, None, **{"seq_lens": [2, 4], **changes})


def test_what_would_not_be_exact_is_refused_by_name():
    attend()
    with pytest.raises(ConfigError, match="not causal"):
        attend(is_causal=False)
    with pytest.raises(ConfigError, match="without seq_lens"):
        attend(seq_lens=None)
    with pytest.raises(DataError, match="5 tokens in total"):
        attend(seq_lens=[2, 3])


def test_models_with_other_attention_are_refused_before_training():
    check_supported(Gemma2ForCausalLM, AutoConfig.for_model("gemma2"))
    strange = SimpleNamespace(model_type="strange", layer_types=["linear_attention", "full_attention", "chunked_attention"])
    with pytest.raises(ConfigError, match="'strange' has layers of type chunked_attention, linear_attention"):
        check_supported(Gemma2ForCausalLM, strange)
    with pytest.raises(ConfigError, match="does not let its attention be chosen"):
        check_supported(SimpleNamespace(_supports_attention_backend=False), SimpleNamespace(model_type="old"))

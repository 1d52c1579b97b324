"""What every supported family is put through. Each function raises where the family does not hold."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
import peft
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.families.families import FAMILIES, VOCABULARY, save_family
from twinkle_core.checkpoint.export import export
from twinkle_core.config import ExportConfig, LoraConfig
from twinkle_core.errors import ConfigError
from twinkle_core.model import TransformersModel
from twinkle_core.model.loading import load_base
from twinkle_core.types import IGNORE, PackedRow

STEPS = 4
LENGTHS = (9, 12, 1, 7)
TOLERANCE = 1e-5
"""Of logits, as a share of the largest."""
EXACT = ExportConfig(form="merged", dtype="float32")
ALL_LINEAR = LoraConfig(rank=4, alpha=16)

Lora = LoraConfig | peft.LoraConfig | None


def rows() -> Sequence[PackedRow]:
    """Two rows of random documents, learnt whole; always the same."""
    generator = np.random.default_rng(5)
    made = []
    for lengths in ((7, 5, 9), (11, 4)):
        ids = generator.integers(3, VOCABULARY, sum(lengths)).astype(np.int32)
        labels = np.roll(ids, -1)
        labels[np.cumsum(lengths) - 1] = IGNORE
        sizes = np.array(lengths, dtype=np.int32)
        made.append(PackedRow(input_ids=ids, labels=labels, seq_lens=sizes, sample_ids=np.arange(len(lengths), dtype=np.int64)))
    return made


def build(folder: Path, lora: Lora) -> TransformersModel:
    model = TransformersModel(folder, seed=3)
    if lora is not None:
        model.add_adapter_to_model("default", lora)
    model.set_optimizer("AdamW", lr=1e-2)
    return model


def train(model: TransformersModel, start: int, stop: int) -> list[float]:
    """Mean losses of steps [start, stop)."""
    losses = []
    for step in range(start, stop):
        losses.append(model.forward_backward(rows(), seed=(9, step)).loss)
        model.clip_grad_and_step()
    return losses


def live(model: TransformersModel) -> PreTrainedModel:
    """The worker's own model."""
    found: PreTrainedModel = model._group._worker.model  # type: ignore[attr-defined]  # a LocalGroup
    return found


def check_step(folder: Path, lora: Lora) -> TransformersModel:
    """Training moves each trained tensor, no other, and lowers the loss."""
    model = build(folder, lora)
    before = model.get_state_dict()
    frozen = {name: value.detach().clone() for name, value in live(model).named_parameters() if not value.requires_grad}
    losses = train(model, 0, STEPS)
    losses.append(model.forward_backward(rows(), seed=(9, STEPS)).loss)
    assert losses[-1] < 0.95 * losses[0], losses
    unmoved = [name for name, value in model.get_state_dict().items() if np.array_equal(value, before[name])]
    assert not unmoved, f"not trained: {unmoved}"
    moved = [name for name, value in live(model).named_parameters() if name in frozen and not torch.equal(value, frozen[name])]
    assert not moved and bool(frozen) == (lora is not None), f"frozen, yet moved: {moved}"
    return model


def experts_lora(name: str) -> peft.LoraConfig:
    """LoRA on the matrices of all experts, which are parameters and no modules, and on the attention."""
    return peft.LoraConfig(
        task_type="CAUSAL_LM", r=2, lora_alpha=8, target_modules=r".*\.o_proj", target_parameters=list(FAMILIES[name].experts)
    )


def check_lora(name: str, folder: Path) -> None:
    check_step(folder, ALL_LINEAR)


def check_experts(name: str, folder: Path) -> None:
    trained = check_step(folder, experts_lora(name)).get_state_dict()
    assert any("experts" in key for key in trained)


def check_full(name: str, folder: Path) -> None:
    check_step(folder, None)


def packed_logits(model: PreTrainedModel, docs: Sequence[torch.Tensor], embeddings: torch.Tensor | None = None) -> torch.Tensor:
    """[T, V] of documents [1, t] in one row."""
    ids = torch.cat(list(docs), dim=1)
    positions = torch.cat([torch.arange(doc.shape[1]) for doc in docs])[None]
    if embeddings is not None:
        handle = model.get_input_embeddings().register_forward_hook(lambda *_: embeddings)
    try:
        logits: torch.Tensor = model(
            input_ids=ids, position_ids=positions, seq_lens=[doc.shape[1] for doc in docs], use_cache=False
        ).logits[0]
    finally:
        if embeddings is not None:
            handle.remove()
    return logits


def check_packed(name: str, folder: Path) -> None:
    """A document in a pack has the logits it has alone, and under the model's own attention; no gradient reaches its neighbours."""
    generator = torch.Generator().manual_seed(1)
    docs = [torch.randint(3, VOCABULARY, (1, length), generator=generator) for length in LENGTHS]
    for training in (True, False):
        model = load_base(folder, torch.device("cpu")).train(training)
        own = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).train(training)
        with torch.no_grad():
            parts = packed_logits(model, docs).split(list(LENGTHS))
            leaking = packed_logits(model, [torch.cat(docs, dim=1)]).split(list(LENGTHS))
            for part, doc in zip(parts, docs, strict=True):
                assert_close(part, packed_logits(model, [doc]))
                assert_close(part, own(input_ids=doc, use_cache=False).logits[0])
        assert (parts[1] - leaking[1]).abs().max() > 0.05, "the check cannot see a leak"
        embeddings = model.get_input_embeddings()(torch.cat(docs, dim=1)).detach().requires_grad_()
        start, stop = LENGTHS[0], LENGTHS[0] + LENGTHS[1]
        packed_logits(model, docs, embeddings)[start:stop].square().sum().backward()
        assert embeddings.grad is not None
        assert torch.count_nonzero(embeddings.grad[0, :start]) == 0 == torch.count_nonzero(embeddings.grad[0, stop:])
        assert (embeddings.grad[0, start:stop].abs().amax(dim=-1) > 0).all()


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE * max(1.0, float(expected.abs().max())))


def check_resume(name: str, folder: Path) -> None:
    """Saved in the middle and resumed equals uninterrupted, to the bit: weights, optimizer, losses. LoRA and full."""
    for lora in (ALL_LINEAR, None):
        with tempfile.TemporaryDirectory() as scratch:
            whole = build(folder, lora)
            train(whole, 0, 2)
            middle = whole.save("middle", scratch)
            losses = train(whole, 2, STEPS)
            resumed = build(folder, lora)
            assert resumed.resume_from_checkpoint(middle)["cur_step"] == 2
            assert train(resumed, 2, STEPS) == losses
            ends = [
                {path.name: path.read_bytes() for path in one.save(str(at), scratch).iterdir()} for at, one in enumerate((whole, resumed))
            ]
            assert ends[0] == ends[1] and len(ends[0]) >= 5


def check_export(name: str, folder: Path) -> None:
    """Merged from LoRA, merged from full training, and the adapter alone load by transformers and peft with the live model's logits."""
    loras: list[Lora] = [ALL_LINEAR, None, *([experts_lora(name)] if FAMILIES[name].experts else [])]
    for lora in loras:
        with tempfile.TemporaryDirectory() as scratch:
            model = build(folder, lora)
            train(model, 0, 2)
            checkpoint = model.save("last", scratch)
            expected = logits_of(live(model))
            export(folder, checkpoint, EXACT, Path(scratch) / "merged")
            assert_close(logits_of(load(Path(scratch) / "merged")), expected)
            check_ties(Path(scratch) / "merged")
            assert (logits_of(load(folder)) - expected).abs().max() > 0.01, "training changed nothing"
            if lora is not None:
                export(folder, checkpoint, ExportConfig(form="adapter", dtype="float32"), Path(scratch) / "adapter")
                assert_close(logits_of(peft.PeftModel.from_pretrained(load(folder), Path(scratch) / "adapter")), expected)


def check_ties(folder: Path) -> None:
    """Tied embeddings lie in the file once, untied ones twice."""
    model = load(folder)
    names = [name for path in folder.glob("*.safetensors") for name in safe_open(path, "pt").keys()]  # noqa: SIM118  # no dict
    tied = model.config.tie_word_embeddings
    assert ("lm_head.weight" in names) == (not tied)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied


def load(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model


def logits_of(model: PreTrainedModel) -> torch.Tensor:
    """[T, V] of one document, by whatever attention the model has."""
    ids = torch.arange(3, 15)[None]
    packed = {"seq_lens": [ids.shape[1]]} if model.config._attn_implementation == "twinkle_packed" else {}
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(input_ids=ids, use_cache=False, **packed).logits[0]
    return logits


CHECKS: Mapping[str, Callable[[str, Path], None]] = MappingProxyType(
    {
        "LoRA": check_lora,
        "experts": check_experts,
        "full": check_full,
        "packed": check_packed,
        "resume": check_resume,
        "export": check_export,
    }
)


@functools.cache
def family_folder(name: str) -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix=f"{name}-")
    save_family(name, Path(folder.name))
    return folder


@functools.cache
def outcome(name: str, check: str) -> str | None:
    """What went wrong, or None: each pair is computed once in a process. A refusal is an outcome too."""
    if check == "experts" and not FAMILIES[name].experts:
        return "no experts"
    try:
        CHECKS[check](name, Path(family_folder(name).name))
    except (AssertionError, ConfigError) as error:
        return f"{type(error).__name__}: {error}"
    return None

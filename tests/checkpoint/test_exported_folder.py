"""What lies in an exported folder, and that a mistake leaves none."""

import hashlib
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from tests.families.checks import build as build_family
from tests.families.families import save_family
from tests.model.tiny_models import batch, save_model
from twinkle_core.checkpoint import export as module
from twinkle_core.checkpoint.export import export
from twinkle_core.config import ExportConfig, LoraConfig
from twinkle_core.errors import ConfigError, DamagedError, DataError
from twinkle_core.model import TransformersModel

EXACT = ExportConfig(form="merged", dtype="float32")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its embeddings are tied."""
    return save_model(tmp_path_factory.mktemp("base"), "qwen2")


@pytest.fixture(scope="module")
def checkpoint(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(base, LoraConfig(rank=4, alpha=32)).save("last", tmp_path_factory.mktemp("checkpoint"))


def train(base: Path, lora: LoraConfig | None) -> TransformersModel:
    model = TransformersModel(base, seed=1)
    if lora:
        model.add_adapter_to_model("mine", lora)
    model.set_optimizer(lr=2e-2)
    for step in range(2):
        model.forward_backward(batch(2, seed=step))
        model.clip_grad_and_step()
    return model


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 15)[None]).logits


def change_json(path: Path, **changes: Any) -> None:
    settings = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(settings | changes))


def copy(folder: Path, to: Path) -> Path:
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


def names_in(folder: Path) -> set[str]:
    return {name for path in folder.glob("*.safetensors") for name in safe_open(path, "pt").keys()}  # noqa: SIM118  # no dict


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_weights_above_a_size_are_cut_into_files_that_an_index_names(base: Path, checkpoint: Path, tmp_path: Path):
    export(base, checkpoint, EXACT, tmp_path / "whole")
    summary = export(base, checkpoint, EXACT, tmp_path / "cut", shard_bytes=70_000)
    shards = sorted((tmp_path / "cut").glob("*.safetensors"))
    assert len(shards) >= 3 and all(path.stat().st_size < 72_000 for path in shards)
    index = json.loads((tmp_path / "cut" / "model.safetensors.index.json").read_text())
    assert {name: tmp_path / "cut" / file for name, file in index["weight_map"].items()} == {
        name: path
        for path in shards
        for name in safe_open(path, "pt").keys()  # noqa: SIM118  # no dict
    }
    assert "model.safetensors.index.json" in summary["files"]
    torch.testing.assert_close(logits(load(tmp_path / "cut")), logits(load(tmp_path / "whole")), rtol=0, atol=0)


def test_the_adapter_is_applied_once_and_the_base_is_left_alone(base: Path, checkpoint: Path, tmp_path: Path):
    """WS03: exported again and again, the folder is the same to the byte, and holds no adapter that a loader would add once more."""
    before = digests(base)
    for name in ("first", "second"):
        export(base, checkpoint, EXACT, tmp_path / name)
    assert digests(tmp_path / "first") == digests(tmp_path / "second")
    assert not list((tmp_path / "first").glob("adapter*")) and digests(base) == before
    whole, update = load_file(tmp_path / "first" / "model.safetensors"), load_file(checkpoint / "adapter_model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    delta = update[f"base_model.model.{name}.lora_B.weight"] @ update[f"base_model.model.{name}.lora_A.weight"] * (32 / 4)
    expected = load_file(base / "model.safetensors")[f"{name}.weight"] + delta
    torch.testing.assert_close(whole[f"{name}.weight"], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("do_sample", [True, False, None])
def test_sampling_settings_stay_only_where_sampling_is_on(base: Path, checkpoint: Path, tmp_path: Path, do_sample: bool | None):
    folder = copy(base, tmp_path / "base")
    sampling = {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    rest = {"eos_token_id": [2, 5], "pad_token_id": 0, "repetition_penalty": 1.1}
    switch = {} if do_sample is None else {"do_sample": do_sample}
    (folder / "generation_config.json").write_text(json.dumps(sampling | rest | switch))
    for form in ("merged", "adapter"):
        export(folder, checkpoint, ExportConfig(form=form), tmp_path / form)
        written = json.loads((tmp_path / form / "generation_config.json").read_text())
        assert written == (sampling if do_sample else {}) | rest | switch
        GenerationConfig.from_pretrained(tmp_path / form).validate(strict=True)


def test_generation_settings_that_cannot_be_saved_are_refused(base: Path, checkpoint: Path, tmp_path: Path):
    folder = copy(base, tmp_path / "base")
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False, "num_return_sequences": 3}))
    with pytest.raises(ConfigError, match=r"generation_config\.json holds settings that transformers refuses"):
        export(folder, checkpoint, EXACT, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("aliased", [True, False], ids=["one matrix", "two matrices"])
@pytest.mark.parametrize("flag", [True, False], ids=["tied", "untied"])
def test_the_config_says_tied_exactly_where_one_matrix_is_saved(flag: bool, aliased: bool, tmp_path: Path):
    folder = save_model(tmp_path / "base", "qwen2", tie_word_embeddings=flag)
    weights = load_file(folder / "model.safetensors")
    embeddings = weights["model.embed_tokens.weight"]
    weights["lm_head.weight"] = embeddings.clone() if aliased else embeddings.flip(0).contiguous()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    model = train(folder, None)
    live = model._group._worker.model.eval()
    with torch.no_grad():
        expected = live(input_ids=torch.arange(3, 15)[None], seq_lens=[12], use_cache=False).logits
    export(folder, model.save("last", tmp_path), EXACT, tmp_path / "out")
    torch.testing.assert_close(logits(load(tmp_path / "out")), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    one = flag and aliased
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] == one
    assert ("lm_head.weight" in names_in(tmp_path / "out")) == (not one)


def peft_folder(base: Path, out: Path, **settings: Any) -> tuple[Path, torch.Tensor]:
    """A folder as peft writes it, its tensors random; and the logits of the model it stands for."""
    torch.manual_seed(3)
    model = peft.get_peft_model(load(base), peft.LoraConfig(task_type="CAUSAL_LM", r=4, **settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter)) if "lora_B" in name else parameter.mul_(1.5)
    model.save_pretrained(out, save_embedding_layers=False)
    return out, logits(model.eval())


def test_an_adapter_on_a_head_that_is_also_the_embedding_is_not_merged(base: Path, tmp_path: Path):
    """WS08: the head would be lost on reload, or the embedding changed too."""
    folder, live = peft_folder(base, tmp_path / "lora", target_modules=["lm_head", "q_proj"])
    with pytest.raises(ConfigError, match=r"lm_head.*tied embeddings"):
        export(base, folder, EXACT, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    export(base, folder, ExportConfig(form="adapter", dtype="float32"), tmp_path / "adapter")
    torch.testing.assert_close(logits(peft.PeftModel.from_pretrained(load(base), tmp_path / "adapter")), live, rtol=0, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_trained_beside_the_adapter_is_there_after_reload(tied: bool, tmp_path: Path):
    """WS08, the head as a whole: of a tied model it is no longer the embedding, and the folder says so."""
    base = save_model(tmp_path / "base", "qwen2", tie_word_embeddings=tied)
    folder, live = peft_folder(base, tmp_path / "lora", target_modules=["q_proj"], modules_to_save=["lm_head"])
    assert (live - logits(load(base))).abs().max() > 0.1
    export(base, folder, EXACT, tmp_path / "merged")
    torch.testing.assert_close(logits(load(tmp_path / "merged")), live, rtol=0, atol=1e-5 * float(live.abs().max()))
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"] is False
    assert "lm_head.weight" in names_in(tmp_path / "merged")


def test_what_is_not_finite_or_becomes_so_is_refused(base: Path, checkpoint: Path, tmp_path: Path):
    folder = copy(checkpoint, tmp_path / "broken")
    weights = load_file(checkpoint / "adapter_model.safetensors")
    name = sorted(weights)[-1]
    save_file(weights | {name: weights[name] * 1e20}, folder / "adapter_model.safetensors")
    for form in ("merged", "adapter"):
        with pytest.raises(DataError, match="as float16 holds values that are not finite"):
            export(base, folder, ExportConfig(form=form, dtype="float16"), tmp_path / "out")
    save_file(weights | {name: weights[name] * float("nan")}, folder / "adapter_model.safetensors")
    with pytest.raises(DataError, match=f"not finite in .*{name}"):
        export(base, folder, EXACT, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken"]


def test_a_folder_appears_whole_or_not_at_all(base: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole = export(base, checkpoint, EXACT, tmp_path / "whole")

    def torn(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(module, "copy_tokenizer", torn)
    empty = tmp_path / "empty"
    empty.mkdir()
    for out in (empty, tmp_path / "absent"):
        with pytest.raises(OSError, match="no space left"):
            export(base, checkpoint, EXACT, out)
    assert list(empty.iterdir()) == []
    monkeypatch.setattr(module, "_check_same", lambda *_: torn())
    with pytest.raises(OSError, match="no space left"):
        export(base, checkpoint, EXACT, tmp_path / "absent")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "whole"]
    monkeypatch.undo()
    assert export(base, checkpoint, EXACT, empty)["files"] == whole["files"]


def test_a_folder_that_reads_back_otherwise_does_not_count(base: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real = PreTrainedModel.save_pretrained

    def flipped(self: PreTrainedModel, out: Path, **settings: Any) -> None:
        real(self, out, **settings)
        weights = load_file(out / "model.safetensors")
        weights["model.norm.weight"][3] += 1
        save_file(weights, out / "model.safetensors", {"format": "pt"})

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", flipped)
    with pytest.raises(DamagedError, match=r"reads back with other values in \['model\.norm\.weight'\]"):
        export(base, checkpoint, EXACT, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_the_config_names_no_code_and_no_quantization(base: Path, checkpoint: Path, tmp_path: Path):
    folder = copy(base, tmp_path / "base")
    change_json(folder / "config.json", auto_map={"AutoModelForCausalLM": "modeling.Own"}, quantization_config=None)
    change_json(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["own.Tokenizer", None]}, eos_token="</s>")
    export(folder, checkpoint, ExportConfig(), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert not {"auto_map", "quantization_config", "_name_or_path"} & config.keys()
    assert config["architectures"] == ["Qwen2ForCausalLM"] and config["dtype"] == "bfloat16" and config["use_cache"] is True
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text()) == {"eos_token": "</s>"}


def test_what_a_models_code_keeps_in_float32_stays_so(tmp_path: Path):
    base = save_family("deepseek_v3", tmp_path / "base")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    weights = load_file(base / "model.safetensors")
    weights[name] += 1 + 2**-20
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    checkpoint = build_family(base, None).save("start", tmp_path)
    export(base, checkpoint, ExportConfig(dtype="bfloat16"), tmp_path / "out")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(exported[name], weights[name]) and exported[name].dtype == torch.float32
    assert {tensor.dtype for key, tensor in exported.items() if key != name} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "chatglm", "auto_map": {"AutoConfig": "configuration_chatglm.ChatGLMConfig"}}, "carries in its own code"),
        ({"model_type": "nobody_knows"}, "carries in its own code"),
        ({"model_type": "clip"}, "'clip' in .* has no causal language model"),
    ],
)
def test_a_base_that_transformers_does_not_carry_is_refused(config: dict[str, Any], reason: str, checkpoint: Path, tmp_path: Path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=reason):
        export(tmp_path / "base", checkpoint, EXACT, tmp_path / "out")
    assert not (tmp_path / "out").exists()

import json
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.model.tiny_models import batch, save_model
from twinkle_core.checkpoint.export import export
from twinkle_core.config import ExportConfig, LoraConfig
from twinkle_core.errors import ConfigError, DamagedError, DataError, TrainingError
from twinkle_core.model import TransformersModel

EXACT = ExportConfig(form="merged", dtype="float32")
NAMES = ("qwen2", "llama")


@pytest.fixture(scope="module", params=NAMES)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, torch.Tensor]:
    """Base folder, checkpoint folder, and the live model's logits; qwen2 ties its embeddings, llama does not."""
    base = save_model(tmp_path_factory.mktemp("base"), request.param)
    (base / "tokenizer_config.json").write_text(json.dumps({"name_or_path": str(base), "eos_token": "</s>"}))
    (base / "chat_template.jinja").write_text("{{ messages }}")
    (base / "README.md").write_text("not copied")
    model = train(base, LoraConfig(rank=4, alpha=32))
    live = model._group._worker.model.eval()
    ids = question()
    with torch.no_grad():
        logits = live(input_ids=ids, seq_lens=[ids.shape[1]], use_cache=False).logits
    return base, model.save("last", tmp_path_factory.mktemp("checkpoint")), logits


def train(base: Path, lora: LoraConfig | None) -> TransformersModel:
    model = TransformersModel(base, seed=1)
    if lora:
        model.add_adapter_to_model("mine", lora)
    model.set_optimizer(lr=2e-2)
    for step in range(3):
        model.forward_backward(batch(3, seed=step))
        model.clip_grad_and_step()
    return model


def question() -> torch.Tensor:
    return torch.arange(3, 15)[None]


def logits_of(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=question()).logits


def load(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def assert_no_local_path(folder: Path, *paths: Path) -> None:
    texts = [path for path in folder.rglob("*") if path.suffix in (".json", ".jinja")]
    assert len(texts) >= 3
    for path in texts:
        for secret in (*paths, folder):
            assert str(secret) not in path.read_text(), path.name
        assert "/tmp" not in path.read_text(), path.name


def test_a_merged_folder_loads_by_itself_with_the_live_models_logits(trained: tuple[Path, Path, torch.Tensor], tmp_path: Path):
    base, checkpoint, live = trained
    summary = export(base, checkpoint, EXACT, tmp_path / "out")
    model = load(tmp_path / "out")
    torch.testing.assert_close(logits_of(model), live, rtol=0, atol=1e-5 * live.abs().max().item())
    assert (logits_of(load(base)) - live).abs().max() > 0.1, "the adapter changed nothing"
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == model.config.tie_word_embeddings
    assert torch.equal(model.get_input_embeddings().weight, load(base).get_input_embeddings().weight)
    assert summary["num_parameters"] == sum(p.numel() for p in model.parameters()) and summary["dtype"] == "float32"
    copied = {"tokenizer_config.json", "chat_template.jinja", "generation_config.json"}
    assert set(summary["files"]) == copied | {"config.json", "model.safetensors"}
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text()) == {"eos_token": "</s>"}
    assert_no_local_path(tmp_path / "out", base, checkpoint)


def test_the_merge_is_cast_once_from_float32(trained: tuple[Path, Path, torch.Tensor], tmp_path: Path):
    base, checkpoint, _ = trained
    export(base, checkpoint, EXACT, tmp_path / "exact")
    export(base, checkpoint, ExportConfig(dtype="bfloat16"), tmp_path / "half")
    exact, half = load_file(tmp_path / "exact" / "model.safetensors"), load_file(tmp_path / "half" / "model.safetensors")
    assert exact.keys() == half.keys()
    for name, tensor in half.items():
        assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, exact[name].to(torch.bfloat16))
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"


def test_an_adapter_folder_loads_by_peft_with_the_live_models_logits(trained: tuple[Path, Path, torch.Tensor], tmp_path: Path):
    base, checkpoint, live = trained
    export(base, checkpoint, ExportConfig(form="adapter", dtype="float32"), tmp_path / "out", base_name="org/base")
    model = peft.PeftModel.from_pretrained(load(base), tmp_path / "out")
    torch.testing.assert_close(logits_of(model), live, rtol=0, atol=1e-5 * live.abs().max().item())
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"] == "org/base"
    assert_no_local_path(tmp_path / "out", base, checkpoint)


@pytest.mark.parametrize("name", NAMES)
def test_fully_trained_weights_are_exported_whole(name: str, tmp_path: Path):
    base = save_model(tmp_path / "base", name)
    model = train(base, None)
    checkpoint = model.save("last", tmp_path)
    export(base, checkpoint, EXACT, tmp_path / "out")
    loaded = dict(load(tmp_path / "out").named_parameters())
    for key, value in model.get_state_dict().items():
        np.testing.assert_array_equal(loaded[key].detach().numpy(), value)
    assert len(loaded) == len(model.get_state_dict())
    with pytest.raises(ConfigError, match="use form 'merged'"):
        export(base, checkpoint, ExportConfig(form="adapter"), tmp_path / "adapter")


def test_an_adapter_that_learnt_nothing_or_does_not_fit_is_refused(trained: tuple[Path, Path, torch.Tensor], tmp_path: Path):
    base, checkpoint, _ = trained
    weights = load_file(checkpoint / "adapter_model.safetensors")
    first = sorted(weights)[0]
    bads = [
        ({name: value * 0 if "lora_B" in name else value for name, value in weights.items()}, TrainingError, "lora_B matrices are zero"),
        ({}, TrainingError, "adapter is empty"),
        ({name: value for name, value in weights.items() if name != first}, DataError, f"{first} is missing"),
        (weights | {"base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": torch.ones(4, 64)}, DataError, "layers.9.* is unexpected"),
    ]
    for number, (tensors, error, text) in enumerate(bads):
        folder = tmp_path / str(number)
        folder.mkdir()
        save_file(tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_bytes((checkpoint / "adapter_config.json").read_bytes())
        for form in ("merged", "adapter"):
            with pytest.raises(error, match=text):
                export(base, folder, ExportConfig(form=form), tmp_path / f"out-{form}-{number}")
    (tmp_path / "0" / "adapter_model.safetensors").write_bytes(b"torn")
    with pytest.raises(DamagedError, match=r"adapter_model\.safetensors"):
        export(base, tmp_path / "0", EXACT, tmp_path / "torn")


def test_a_folder_in_use_a_quantized_base_and_a_hidden_path_are_refused(trained: tuple[Path, Path, torch.Tensor], tmp_path: Path):
    base, checkpoint, _ = trained
    with pytest.raises(ConfigError, match="not empty"):
        export(base, checkpoint, EXACT, base)
    copied = tmp_path / "copied"
    copied.mkdir()
    for path in base.iterdir():
        (copied / path.name).write_bytes(path.read_bytes())
    (copied / "chat_template.jinja").write_text(f"{{# from {copied} #}}")
    with pytest.raises(DataError, match=r"chat_template\.jinja holds the local path"):
        export(copied, checkpoint, EXACT, tmp_path / "leak")
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq", "bits": 4}}))
    with pytest.raises(ConfigError, match="is quantized"):
        export(copied, checkpoint, EXACT, tmp_path / "quantized")

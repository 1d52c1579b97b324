"""What `TransformersModel` takes and gives: models from ids and settings, inputs of all kinds, losses, patches, processors."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.hub_server import running_hubs
from tests.model.tiny_models import SIZES, batch, packed_row, save_model
from tests.tokenizers import train_tokenizer
from twinkle_core.config import LoraConfig
from twinkle_core.dataset.input_feature import input_feature
from twinkle_core.errors import ConfigError, DataError, StorageError
from twinkle_core.loss.base import LossInputs, LossOutput, ModelOutputs
from twinkle_core.model import TransformersModel, saving
from twinkle_core.processor import InputProcessor

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}\n{% endfor %}"
)
LORA = LoraConfig(rank=4, alpha=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("base"), "llama")


def build(folder: Path, **settings: Any) -> TransformersModel:
    model = TransformersModel(folder, seed=3, **settings)
    model.add_adapter_to_model("default", LORA)
    model.set_optimizer(lr=1e-2)
    return model


def test_a_configuration_gives_random_weights_by_the_seed() -> None:
    config = LlamaConfig(**SIZES)
    one, same, other = (TransformersModel(config=config, model_cls=LlamaForCausalLM, seed=seed) for seed in (1, 1, 2))
    weights = [model.get_state_dict() for model in (one, same, other)]
    assert all(np.array_equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not all(np.array_equal(weights[0][name], weights[2][name]) for name in weights[0])


def test_settings_of_the_configuration_are_keywords_and_others_are_refused_by_name(folder: Path) -> None:
    model = TransformersModel(folder, attention_dropout=0.5)
    assert model._group._worker.model.config.attention_dropout == 0.5
    refused = {
        "rms_eps=1 is no setting of a llama model; known: .*rms_norm_eps": {"rms_eps": 1},
        "trust_remote_code=True is not taken: code that comes with": {"trust_remote_code": True},
        "attn_implementation='eager' is not taken": {"attn_implementation": "eager"},
        "strategy is 'deepspeed'; known: accelerate, native_fsdp": {"strategy": "deepspeed"},
        "ddp_config has bucket; known: find_unused": {"ddp_config": {"bucket": 1}},
        "fsdp_config and memory_efficient_init are for": {"fsdp_config": {"reshard_after_forward": True}},
        "mixed_precision is 'fp8': cpu has no float8": {"mixed_precision": "fp8"},
        "mixed_precision is 'int4'; known: no, fp16, bf16, fp8": {"mixed_precision": "int4"},
        "model_cls is 'Llama', which is no model class": {"model_cls": "Llama"},
    }
    for text, settings in refused.items():
        with pytest.raises(ConfigError, match=text):
            TransformersModel(folder, **settings)
    with pytest.raises(ConfigError, match="neither model_id nor config"):
        TransformersModel()
    with pytest.raises(ConfigError, match="unknown scheme ftp://; use .*hf://, ms://, pypi://, s3://"):
        TransformersModel("ftp://Qwen/Qwen3-0.6B")
    for strategy in ("accelerate", "native_fsdp"):
        assert TransformersModel(folder, strategy=strategy, ddp_config={"static_graph": True}).cur_step == 0


def test_input_features_and_trajectories_are_the_rows_they_encode_to(folder: Path, tmp_path: Path) -> None:
    rows = batch(3)
    expected = build(folder).forward_only(rows)
    features = [dict(input_feature(row)) for row in rows]
    bare = [{name: feature[name] for name in ("input_ids", "labels", "position_ids")} for feature in features]
    lists = [{name: value.tolist() for name, value in feature.items()} for feature in bare]
    for inputs in (features, bare, lists):
        assert build(folder).forward_only(inputs) == expected
    assert build(folder).forward_only(features[0]) == expected[:1]
    with pytest.raises(DataError, match="input 0 has input_ids but no labels"):
        build(folder).forward_only([{"input_ids": [1, 2]}])
    model = build(folder)
    talk = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "there"}]}
    with pytest.raises(ConfigError, match="call set_template first"):
        model.forward_backward([talk])
    model = build(save_model(tmp_path / "larger", "llama", vocab_size=512))
    tokenizer = train_tokenizer(tmp_path / "tokenizer", TEMPLATE)
    model.set_template("Template", model_id=tokenizer)
    sample = model._templates["default"].encode(talk)
    assert 0 < sample.num_loss_tokens < len(sample.input_ids)
    assert model.forward_only([talk, talk]) == 2 * model.forward_only([sample])
    with pytest.raises(DataError, match="neither a row .* nor a trajectory"):
        model.forward_backward([{"text_": 1}])


def test_logits_logps_and_temperature(folder: Path) -> None:
    rows = batch(2)
    model = build(folder)
    answers = model.forward_only(rows, micro_batch_size=2, return_logits=True, return_logps=True)
    for row, answer in zip(rows, answers, strict=True):
        labels = torch.from_numpy(row.labels[row.labels != -100].astype(np.int64))
        logits = torch.from_numpy(answer["logits"])
        logps = logits.log_softmax(-1).gather(1, labels[:, None])[:, 0].numpy()
        np.testing.assert_allclose(answer["logps"], logps, rtol=1e-5, atol=1e-6)
        assert answer["loss_sum"] == pytest.approx(-float(logps.sum()), rel=1e-5)
        assert answer["num_correct"] == int((logits.argmax(-1) == labels).sum())
    hot = model.forward_only(rows, return_logits=True, temperature=2.0)
    np.testing.assert_allclose(hot[0]["logits"], answers[0]["logits"] / 2, rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigError, match="temperature is 0"):
        model.forward_only(rows, temperature=0)
    with pytest.raises(ConfigError, match="task is 'seq_cls'; known: causal_lm, embedding, fused_lm_ce"):
        model.forward_only(rows, task="seq_cls")
    assert model.forward_only(rows, task="fused_lm_ce") == model.forward_only(rows)


def test_embeddings_are_the_last_hidden_states_of_single_documents(folder: Path) -> None:
    row = packed_row(5, 3, learn_nothing=True)
    [answer] = TransformersModel(folder).forward_only([row], task="embedding")
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").model
    for number, part in enumerate(np.split(row.input_ids, [5])):
        with torch.no_grad():
            last = model(input_ids=torch.from_numpy(part[None].astype(np.int64))).last_hidden_state[0, -1]
        np.testing.assert_allclose(answer["embeddings"][number], last / last.norm(), rtol=1e-4, atol=1e-6)


def gradient(model: TransformersModel) -> torch.Tensor:
    return model._group._worker.state().gradients.flat.clone()


@pytest.mark.parametrize("name", ["CrossEntropyLoss", "ChunkedCrossEntropyLoss", "FusedLinearCrossEntropyLoss"])
def test_each_form_of_cross_entropy_is_what_no_loss_stands_for(folder: Path, name: str) -> None:
    plain, named = build(folder), build(folder)
    named.set_loss(name)
    rows = [*batch(3), packed_row(4, learn_nothing=True)]
    one, other = (model.forward_backward(rows, micro_batch_size=2) for model in (plain, named))
    assert other.loss == pytest.approx(one.loss, rel=1e-6) and other.num_loss_tokens == one.num_loss_tokens
    torch.testing.assert_close(gradient(named), gradient(plain), rtol=1e-4, atol=1e-5)
    assert named.clip_grad_and_step() == pytest.approx(plain.clip_grad_and_step(), rel=1e-5)


def squared(inputs: LossInputs, outputs: ModelOutputs) -> LossOutput:
    assert outputs.log_probs is not None
    return LossOutput(loss_sum=outputs.log_probs.square().sum(), weight=2.0 * len(inputs.labels))


def test_a_users_loss_is_divided_by_its_own_weight_over_the_whole_batch(folder: Path) -> None:
    rows = batch(3)
    model = build(folder)
    logps = np.concatenate([answer["logps"] for answer in model.forward_only(rows, return_logps=True)])
    model.set_loss(squared)
    assert model.forward_backward(rows).loss == pytest.approx(float(np.square(logps).sum() / (2 * len(logps))), rel=1e-5)
    model.set_loss(lambda inputs, outputs: outputs.log_probs.sum())
    with pytest.raises(ConfigError, match="gave a Tensor; a loss gives LossOutput"):
        model.forward_backward(rows)
    with pytest.raises(ConfigError, match="loss is 'Crossentropy'; known: CrossEntropyLoss"):
        model.set_loss("Crossentropy")


def test_a_policy_loss_takes_its_inputs_row_by_row_however_the_rows_are_cut(folder: Path) -> None:
    rows = batch(4)
    model = build(folder)
    scored = model.forward_only(rows, return_logps=True)
    old = [answer["logps"] - 0.1 for answer in scored]
    advantages = [np.linspace(-1, 1, len(row.seq_lens), dtype=np.float32) + number for number, row in enumerate(rows)]
    gradients = []
    for size in (1, 4):
        model = build(folder)
        model.set_loss("BNPOLoss", epsilon=0.2)
        output = model.forward_backward(rows, micro_batch_size=size, old_logps=old, advantages=advantages)
        gradients.append(gradient(model) / output.loss_weight)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-6)
    assert gradients[0].any()
    model = build(folder)
    model.set_loss("BNPOLoss")
    with pytest.raises(DataError, match="needs old_log_probs"):
        model.forward_backward(rows)
    with pytest.raises(ConfigError, match="advantages has 1 entries for 4 rows"):
        model.forward_backward(rows, advantages=[1.0])
    with pytest.raises(ConfigError, match="a loss takes no 'advantage'; known: advantages"):
        model.forward_backward(rows, advantage=advantages)


class Doubled:
    """A patch: the head's logits times two."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, model: torch.nn.Module) -> None:
        model.get_output_embeddings().register_forward_hook(lambda module, inputs, output: output * self.factor)


def test_a_patch_changes_how_the_model_computes_and_not_what_it_is_made_of(folder: Path) -> None:
    rows = batch(2)
    model = build(folder)
    plain = model.forward_only(rows, return_logits=True)
    model.apply_patch(Doubled, factor=2.0)
    np.testing.assert_allclose(model.forward_only(rows, return_logits=True)[0]["logits"], 2 * plain[0]["logits"], rtol=1e-5, atol=5e-5)
    with pytest.raises(ConfigError, match="patch is 'liger'; known: NoSplitModulesPatch"):
        model.apply_patch("liger")
    with pytest.raises(ConfigError, match=r"the patch replaced parameters \(.*lm_head"):
        model.apply_patch(lambda inner: inner.set_output_embeddings(torch.nn.Linear(64, 256, bias=False)))


class Reversed(InputProcessor):
    def collate(self, rows: Any) -> dict[str, Any]:
        return super().collate([replace(row, input_ids=row.input_ids[::-1].copy()) for row in rows])


def test_a_processor_collates(folder: Path) -> None:
    rows = batch(2)
    model = build(folder)
    turned = [replace(row, input_ids=row.input_ids[::-1].copy()) for row in rows]
    expected = model.forward_only(turned)
    model.set_processor(Reversed)
    assert model.forward_only(rows) == expected
    model.set_processor("InputProcessor")
    assert model.forward_only(turned) == expected
    for bad, text in (("Padded", "known: InputProcessor"), (object(), "has no collate")):
        with pytest.raises(ConfigError, match=text):
            model.set_processor(bad)


def test_metrics_are_numbers_over_the_calls_since_the_last_time(folder: Path) -> None:
    model = build(folder)
    outputs = [model.forward_backward(batch(2, seed=call)) for call in range(2)]
    norm = model.clip_grad_and_step()
    found = model.calculate_metric(is_training=True)
    weight = sum(output.loss_weight for output in outputs)
    assert found["loss"] == pytest.approx(sum(output.loss_sum for output in outputs) / weight)
    assert found["num_loss_tokens"] == weight and found["step"] == 1 and found["lr"] == 1e-2 and found["grad_norm"] == norm
    assert all(isinstance(value, (int, float)) for value in found.values())
    assert "loss" not in model.calculate_metric(is_training=True), "nothing was trained since"
    rows = batch(3)
    answers = model.forward_only(rows)
    rated = model.calculate_metric(is_training=False)
    assert rated["loss"] == pytest.approx(sum(a["loss_sum"] for a in answers) / sum(a["num_loss_tokens"] for a in answers))


def test_a_users_metrics_see_every_micro_batch_and_the_steps(folder: Path) -> None:
    model = build(folder)
    model.add_metric("Accuracy", is_training=None)
    model.add_metric("TrainMetric")
    rows = batch(4)
    answers = model.forward_only(rows)
    share = sum(answer["num_correct"] for answer in answers) / sum(answer["num_loss_tokens"] for answer in answers)
    [name] = [key for key in model.calculate_metric(is_training=False) if "accuracy" in key]
    model.forward_only(rows[:1])
    model.forward_only(rows[1:], micro_batch_size=2)
    assert model.calculate_metric(is_training=False)[name] == pytest.approx(share)
    assert name not in model.calculate_metric(is_training=False), "nothing was seen since"
    model.forward_backward(rows, micro_batch_size=3)
    norm = model.clip_grad_and_step()
    found = model.calculate_metric(is_training=True)
    assert found[name] == pytest.approx(share), "it has seen the model before the step"
    assert found["step"] == 1 and found["grad_norm"] == norm and found["total_seconds"] > 0
    plain = build(folder)
    plain.forward_backward(rows, micro_batch_size=3)
    assert plain.clip_grad_and_step() == norm, "looking changes nothing"
    with pytest.raises(ConfigError, match="CompletionRewardMetric is not fed by the model"):
        model.add_metric("CompletionRewardMetric")
    with pytest.raises(ConfigError, match="metric is 'Acc'; known: LossMetric"):
        model.add_metric("Acc")


def test_the_settings_can_be_read(folder: Path) -> None:
    model = TransformersModel(folder)
    model.add_adapter_to_model("default", peft.LoraConfig(r=8, lora_alpha=32, target_modules="all-linear"), gradient_accumulation_steps=2)
    model.set_optimizer("AdamW", lr=1e-4)
    shown = json.loads(model.get_train_configs())
    assert shown["gradient_accumulation_steps"] == 2 and shown["optimizer"]["groups"][0]["lr"] == 1e-4
    assert shown["num_trained_parameters"] == sum(value.size for value in model.get_state_dict().values())
    assert model.get_peft_config_dict()["r"] == 8 and shown["adapter_config"]["lora_alpha"] == 32
    with pytest.raises(ConfigError, match="there is no adapter"):
        TransformersModel(folder).get_peft_config_dict()


@pytest.mark.parametrize("target", ["org/name", "hf://org/name", "ms://org/name"])
def test_what_was_saved_is_uploaded_behind_training_and_a_failure_is_raised(
    folder: Path, tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    from twinkle_core.hub import upload

    model = build(folder)
    saved = model.save("last", tmp_path)
    assert saved is not None
    with running_hubs() as hubs:
        for name, value in {"HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True, "ENDPOINT": hubs.endpoint}.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", hubs.endpoint)
        monkeypatch.setattr(upload, "PAUSE_SECONDS", 0.01)
        model.upload_to_hub(saved, target, "token", async_upload=True)
        model.wait_for_upload()
        there = hubs.visible("org/name")
        assert {name: there[name] for name in there if name != ".gitattributes"} == {
            path.name: path.read_bytes() for path in saved.iterdir()
        }
        (saved / "README.md").write_text("new")
        hubs.cut["/commit/"] = 99
        model.upload_to_hub(saved, target, "token", async_upload=True)
        with pytest.raises(StorageError, match="cannot upload to org/name"):
            model.wait_for_upload()
        model.wait_for_upload()  # it was said
        model.upload_to_hub(saved, target, "token", async_upload=True)
        with pytest.raises(StorageError, match="cannot upload to org/name"):
            model.shutdown()


def test_an_upload_needs_a_folder_and_a_hub(folder: Path, tmp_path: Path) -> None:
    model = build(folder)
    with pytest.raises(ConfigError, match="hub_model_id is 's3://org/name'; write hf://organisation/name"):
        model.upload_to_hub(tmp_path, "s3://org/name")
    with pytest.raises(ConfigError, match=r"nowhere does not exist on the machine of worker 0"):
        model.upload_to_hub(tmp_path / "nowhere", "org/name")


def test_no_call_to_the_workers_lasts_as_long_as_an_upload(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks wait in each call for worker 0's answer, and not for ever."""
    from twinkle_core.hub import upload

    model = build(folder)
    looks: list[int] = []

    def slow(*_: Any) -> str:
        deadline = time.monotonic() + 30
        while len(looks) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        raise StorageError("the hub is away")

    call = model._group.call

    def noted(method: str, *args: Any, **settings: Any) -> Any:
        looks.extend([1] if method == "wait_for_upload" else [])
        return call(method, *args, **settings)

    monkeypatch.setattr(upload, "upload_model_folder", slow)
    monkeypatch.setattr(saving, "WAIT_SECONDS", 0.02)
    monkeypatch.setattr(model._group, "call", noted)
    with pytest.raises(StorageError, match="the hub is away"):
        model.upload_to_hub(tmp_path, "org/name")
    assert len(looks) >= 3
    model.shutdown()

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from tests.model.tiny_models import CONFIGS, batch, packed_row, save_model
from twinkle_core.config import LoraConfig
from twinkle_core.errors import ConfigError, TrainingError
from twinkle_core.infra.group import WorkerGroup
from twinkle_core.infra.local_group import LocalGroup
from twinkle_core.infra.ray_group import RayGroup
from twinkle_core.model import TRANSFORMERS_WORKER, TransformersModel
from twinkle_core.model.seeding import derive_seed
from twinkle_core.types import IGNORE, EncodedSample, PackedRow

LORA = LoraConfig(rank=4, alpha=8, dropout=0.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_model(tmp_path_factory.mktemp(name), name) for name in CONFIGS}


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=200_000_000)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def two_workers(local_ray: None) -> Iterator[RayGroup]:
    with RayGroup(TRANSFORMERS_WORKER, workers=2) as group:
        yield group


def build(folder: Path, lora: LoraConfig | None = LORA, group: WorkerGroup | None = None, lr: float = 1e-2) -> TransformersModel:
    model = TransformersModel(folder, group=group, seed=3)
    if lora is not None:
        model.add_adapter_to_model("default", lora)
    model.set_optimizer("AdamW", lr=lr)
    model.set_lr_scheduler("ConstantWarmupScheduler", num_training_steps=100)
    return model


Gradient = tuple[dict[str, np.ndarray], float, int]


def gradient(model: TransformersModel, calls: Sequence[Sequence[PackedRow]], out: Path, micro_batch_size: int = 1) -> Gradient:
    """The normalised gradient of one step (Adam's first moment after it is a tenth of it), its norm, and the tokens it is over."""
    outputs = [model.forward_backward(rows, micro_batch_size=micro_batch_size, seed=(5, 0)) for rows in calls]
    norm = model.clip_grad_and_step(max_grad_norm=1e9)
    moments = load_file(model.save("step", out) / "optimizer.safetensors")
    grads = {name.removesuffix(".exp_avg"): 10 * value for name, value in moments.items() if name.endswith(".exp_avg")}
    return grads, norm, sum(output.num_loss_tokens for output in outputs)


def by_hand(folder: Path, rows: Sequence[PackedRow]) -> Gradient:
    """Gradient of the mean token loss of all documents, one by one through transformers' own eager model and torch's own loss."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    total, count = torch.zeros(()), 0
    for row in rows:
        ends = np.cumsum(row.seq_lens)
        for start, stop in zip(ends - row.seq_lens, ends, strict=True):
            ids, labels = (torch.from_numpy(part[start:stop].astype(np.int64)) for part in (row.input_ids, row.labels))
            logits = model(input_ids=ids[None], use_cache=False).logits[0]
            total = total + torch.nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORE)
            count += int((labels != IGNORE).sum())
    (total / count).backward()
    return {name: parameter.grad.numpy() for name, parameter in model.named_parameters() if parameter.grad is not None}, total.item(), count


def assert_same_gradient(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys() and any(value.any() for value in expected.values())
    scale = max(np.abs(value).max() for value in expected.values())
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=2e-6 * scale, err_msg=name)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_gradient_is_that_of_the_mean_token_loss_over_single_documents(folders: dict[str, Path], name: str, tmp_path: Path):
    rows = batch(4)
    expected, loss_sum, count = by_hand(folders[name], rows)
    model = build(folders[name], lora=None)
    output = model.forward_backward(rows, micro_batch_size=2)
    assert output.num_loss_tokens == count and output.loss_sum == pytest.approx(loss_sum, rel=1e-5)
    model = build(folders[name], lora=None)
    found, norm, _ = gradient(model, [rows], tmp_path, micro_batch_size=2)
    assert_same_gradient(found, expected)
    assert norm == pytest.approx(np.sqrt(sum(np.square(value).sum() for value in expected.values())), rel=1e-5)


@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
def test_micro_batches_and_calls_do_not_change_the_gradient(folders: dict[str, Path], lora: LoraConfig | None, tmp_path: Path):
    rows = batch(5)
    results = [gradient(build(folders["qwen3"], lora), [rows], tmp_path / str(size), size) for size in (1, 2, 4)]
    results.append(gradient(build(folders["qwen3"], lora), [rows[:1], rows[1:]], tmp_path / "calls"))
    for grads, norm, count in results[1:]:
        assert_same_gradient(grads, results[0][0])
        assert norm == pytest.approx(results[0][1], rel=1e-5) and count == results[0][2]


def test_dropout_does_not_depend_on_how_micro_batches_are_spread_over_calls(folders: dict[str, Path], tmp_path: Path):
    rows = [packed_row(9)] * 3  # equal rows: only their dropout tells them apart
    lora = LoraConfig(rank=4, alpha=8, dropout=0.3)
    ways = ([rows], [rows[:1], rows[1:]], [rows[:2], rows[2:]])
    results = [gradient(build(folders["llama"], lora), calls, tmp_path / str(number)) for number, calls in enumerate(ways)]
    for grads, _, _ in results[1:]:
        assert_same_gradient(grads, results[0][0])


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [1, 3, 4])
def test_two_workers_give_the_gradient_of_one_with_dropout_and_with_uneven_or_no_work(
    folders: dict[str, Path], two_workers: RayGroup, num_rows: int, tmp_path: Path
):
    rows = batch(num_rows, seed=num_rows)
    lora = LoraConfig(rank=4, alpha=8, dropout=0.1)
    one = build(folders["llama"], lora)
    two = build(folders["llama"], lora, two_workers)
    dry = gradient(build(folders["llama"]), [rows], tmp_path / "dry")
    start = one.get_state_dict()
    for name, value in two.get_state_dict().items():
        np.testing.assert_array_equal(value, start[name])
    alone, together = gradient(one, [rows], tmp_path / "one"), gradient(two, [rows], tmp_path / "two")
    assert_same_gradient(together[0], alone[0])
    assert together[1] == pytest.approx(alone[1], rel=1e-5) and together[2] == alone[2]
    assert abs(dry[1] / alone[1] - 1) > 1e-3, "dropout changed nothing"
    assert [row["num_loss_tokens"] for row in two.forward_only(rows)] == [row.num_loss_tokens for row in rows]
    for name, value in two.get_state_dict().items():
        np.testing.assert_allclose(value, one.get_state_dict()[name], atol=1e-4)


@pytest.mark.slow
def test_two_workers_answer_as_one_whatever_part_of_the_interface_is_asked(folders: dict[str, Path], two_workers: RayGroup):
    rows = batch(5)

    def ask(group: WorkerGroup | None) -> list[float]:
        model = TransformersModel(folders["llama"], group=group, seed=3, mixed_precision="fp16", grad_scaler_config={"init_scale": 2.0**19})
        model.add_adapter_to_model("one", LORA, gradient_accumulation_steps=2)
        model.add_adapter_to_model("two", LORA)
        for name in ("one", "two"):
            model.set_optimizer("AdamW", lr=1e-3, adapter_name=name)
            model.add_metric("Accuracy", adapter_name=name)
        numbers: list[float] = []
        for _ in range(14):
            scored = model.forward(rows, micro_batch_size=2, adapter_name="one")
            numbers += [float(answer["logps"].sum()) for answer in scored]
            numbers.append(model.calculate_loss(adapter_name="one"))
            model.backward(adapter_name="one")
            norm = model.clip_grad_and_step(adapter_name="one")
            numbers.append(norm if np.isfinite(norm) else -1.0)
        assert 0 < model.get_step(adapter_name="one") < 7, "steps were skipped, and some taken"
        model.set_loss("BNPOLoss", adapter_name="two")
        model.set_grad_scaler(init_scale=8.0, adapter_name="two")
        old = [answer["logps"] for answer in model.forward_only(rows, return_logps=True, adapter_name="two")]
        advantages = [np.arange(len(row.seq_lens)) - 0.5 for row in rows]
        model.forward_backward(rows, adapter_name="two", old_logps=old, advantages=advantages)
        numbers += [model.clip_grad_and_step(adapter_name="two")]
        metrics = [model.calculate_metric(flag, adapter_name=name) for flag in (True, False) for name in ("one", "two")]
        numbers += [value for found in metrics for key, value in sorted(found.items()) if "second" not in key]
        return numbers

    assert ask(two_workers) == pytest.approx(ask(None), rel=2e-3, abs=1e-4)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_on_a_ray_worker_names_the_step_and_nothing_is_saved(
    folders: dict[str, Path], two_workers: RayGroup, tmp_path: Path
):
    # The last test of the shared group: it does not survive.
    model = build(folders["llama"], group=two_workers, lr=1e30)
    model.forward_backward(batch(3))
    assert model.clip_grad_and_step() > 0
    output, norm = model.forward_backward(batch(3)), model.clip_grad_and_step()
    for number in (output.loss_sum, norm):
        with pytest.raises(TrainingError, match=r"loss of micro-batch \d is (nan|inf) at optimizer step 2"):
            float(number)
    with pytest.raises(TrainingError, match=r"loss of micro-batch \d is (nan|inf) at optimizer step 2.* Nothing is saved"):
        model.save("broken", tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(TrainingError, match="was ended when worker . raised TrainingError in 'close_window'"):
        model.clip_grad_and_step()


def test_a_step_without_any_supervised_token_is_refused(folders: dict[str, Path]):
    model = build(folders["llama"])
    with pytest.raises(TrainingError, match="no supervised token before optimizer step 1"):
        model.clip_grad_and_step()
    assert model.forward_backward([packed_row(6, learn_nothing=True)]).num_loss_tokens == 0
    with pytest.raises(TrainingError, match="no supervised token before optimizer step 1"):
        model.clip_grad_and_step()


def test_only_supervised_positions_reach_the_output_layer(folders: dict[str, Path]):
    model = build(folders["llama"])
    seen: list[int] = []
    head = model._group._worker.model.get_output_embeddings()
    hook = head.register_forward_hook(lambda module, inputs, output: seen.append(output.shape[0] * output.shape[1]))
    rows = [*batch(3), packed_row(5, learn_nothing=True)]
    model.forward_backward(rows, micro_batch_size=2)
    model.forward_only(rows)
    hook.remove()
    counts = [row.num_loss_tokens for row in rows]
    assert seen == [counts[0] + counts[1], counts[2], *counts[:3]] and min(counts[:3]) > 0
    assert sum(counts) < sum(len(row.input_ids) for row in rows)


def test_forward_only_scores_each_row_without_dropout_and_leaves_training_as_it_was(folders: dict[str, Path]):
    rows = [*batch(4), packed_row(5, learn_nothing=True)]
    model = build(folders["qwen2"], LoraConfig(rank=4, alpha=8, dropout=0.5))
    model.forward_backward(rows)
    model.clip_grad_and_step()
    apart, together = model.forward_only(rows), model.forward_only(rows, micro_batch_size=3)
    assert model._group._worker.model.training
    for one, other, row in zip(apart, together, rows, strict=True):
        assert one["num_loss_tokens"] == other["num_loss_tokens"] == row.num_loss_tokens
        assert one["num_correct"] == other["num_correct"] <= row.num_loss_tokens
        assert one["loss_sum"] == pytest.approx(other["loss_sum"], rel=1e-5)
    assert apart[-1] == {"loss_sum": 0.0, "num_loss_tokens": 0, "num_correct": 0}
    sample = EncodedSample(input_ids=rows[0].input_ids, labels=rows[0].labels)
    assert model.forward_only([sample])[0] == pytest.approx(apart[0]), "one document of a row is the row"


def test_a_learnt_row_is_counted_as_correct(folders: dict[str, Path]):
    model = build(folders["llama"], lr=3e-2)
    rows = [packed_row(12)]
    first = model.forward_backward(rows).loss
    for _ in range(40):
        model.clip_grad_and_step()
        last = model.forward_backward(rows).loss
    assert last < 0.05 < first
    assert model.forward_only(rows)[0]["num_correct"] == rows[0].num_loss_tokens == 10


def test_the_norm_is_clipped_to_and_the_rate_follows_optimizer_steps(folders: dict[str, Path]):
    model = TransformersModel(folders["llama"], seed=3)
    model.add_adapter_to_model("default", LORA)
    model.set_optimizer("AdamW", lr=0.5)
    model.set_lr_scheduler("LinearWarmupScheduler", num_training_steps=4, num_warmup_steps=2)
    rates = []
    for _ in range(4):
        for _ in range(3):
            model.forward_backward(batch(1))
        rates.append(model.get_lr())
        flat = model._group._worker.state().gradients.flat
        expected = flat.norm().item() / (3 * batch(1)[0].num_loss_tokens)
        assert model.clip_grad_and_step(max_grad_norm=1e-3) == pytest.approx(expected, rel=1e-5) and expected > 1e-3
        assert flat.norm() == 0
    assert rates == pytest.approx([0.25, 0.5, 0.5, 0.25]) and model.get_lr() == 0 and model.cur_step == 4
    model.forward_backward(batch(1))
    with pytest.raises(TrainingError, match="step 5 is past the schedule's num_training_steps=4"):
        model.clip_grad_and_step()


def test_two_runs_are_equal_to_the_bit_and_another_seed_is_not(folders: dict[str, Path]):
    lora = LoraConfig(rank=4, dropout=0.2)

    def run(seed: int) -> dict[str, np.ndarray]:
        model = build(folders["qwen3"], lora)
        for step in range(3):
            model.forward_backward(batch(3, seed=step), seed=(seed, step))
            model.clip_grad_and_step()
        return model.get_state_dict()

    first, second, other = run(1), run(1), run(2)
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert not all(np.array_equal(first[name], other[name]) for name in first)
    assert derive_seed(1, 23) != derive_seed(12, 3) and 0 <= derive_seed(1, 2, 3) < 2**63


def test_wrong_use_is_refused_with_what_to_do(folders: dict[str, Path], tmp_path: Path):
    with pytest.raises(ConfigError, match="does not exist"):
        TransformersModel(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="mixed_precision is 'fp8'"):
        TransformersModel(folders["llama"], mixed_precision="fp8")
    model = TransformersModel(folders["qwen2"])
    with pytest.raises(ConfigError, match="call set_optimizer first"):
        model.forward_backward(batch(1))
    with pytest.raises(ConfigError, match="tied embeddings"):
        model.add_adapter_to_model("default", LoraConfig(target_modules=("lm_head", "q_proj")))
    model.add_adapter_to_model("default", LORA)
    with pytest.raises(ConfigError, match="optimizer is 'Adams'; known: ASGD, .*AdamW"):
        model.set_optimizer("Adams", lr=1.0)
    with pytest.raises(ConfigError, match="AdamW has no argument beta; known: lr, betas"):
        model.set_optimizer(lr=1.0, beta=0.9)
    with pytest.raises(ConfigError, match="AdamW needs lr"):
        model.set_optimizer()
    with pytest.raises(ConfigError, match="optimizer is 'LBFGS' .it needs the loss several times"):
        model.set_optimizer("LBFGS", lr=1.0)
    model.set_optimizer(lr=1.0)
    with pytest.raises(ConfigError, match="adapter 'default' is there already"):
        model.add_adapter_to_model("default", LORA)
    full = TransformersModel(folders["qwen2"])
    full.set_optimizer(lr=1.0)
    with pytest.raises(ConfigError, match="add adapters before set_optimizer"):
        full.add_adapter_to_model("late", LORA)
    with pytest.raises(ConfigError, match="micro_batch_size is 0"):
        model.forward_backward(batch(1), micro_batch_size=0)
    with pytest.raises(ConfigError, match="no rows"):
        model.forward_backward([])


def test_bf16_keeps_trained_parameters_float32_and_comes_near_the_float32_loss(folders: dict[str, Path]):
    rows = batch(2)
    exact = build(folders["llama"]).forward_backward(rows).loss
    model = TransformersModel(folders["llama"], mixed_precision="bf16", seed=3)
    model.add_adapter_to_model("default", LORA)
    model.set_optimizer(lr=1e-2)
    assert model.forward_backward(rows).loss == pytest.approx(exact, rel=0.05)
    assert model.clip_grad_and_step() > 0
    assert {value.dtype for value in model.get_state_dict().values()} == {np.dtype("float32")}
    assert isinstance(model._group, LocalGroup)

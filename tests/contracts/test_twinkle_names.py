"""Names and arguments of ModelScope's Twinkle, as its scripts use them: each is there, or is refused with a reason that says so.

The list is written down here from its public signatures (0.4.0.dev0): infra, processor, model, losses, metrics, patches.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.model.tiny_models import batch, packed_row, save_model
from twinkle_core.errors import ConfigError
from twinkle_core.loss import build_loss
from twinkle_core.metric import build_metric
from twinkle_core.model import TransformersModel

SIGNATURES: dict[str, str] = {
    "twinkle_core:initialize": "mode nproc_per_node ncpu_proc_per_node seed full_determinism groups global_device_mesh "
    "lazy_collect name notifier",
    "twinkle_core:get_device_placement": "device_group",
    "twinkle_core:remote_class": "execute",
    "twinkle_core:remote_function": "dispatch execute collect sync lazy_collect timeout",
    "twinkle_core:DeviceMesh": "mesh mesh_dim_names ep_size etp_size ep_fsdp_size vpp_size ulysses_size sequence_parallel device_type",
    "twinkle_core:DeviceMesh.from_sizes": "world_size dp_size fsdp_size tp_size pp_size ulysses_size cp_size ep_size etp_size ep_fsdp_size "
    "vpp_size device_type sequence_parallel",
    "twinkle_core:DeviceMesh.create_process_group": "dims",
    "twinkle_core:DeviceMesh.get_dim_group": "dims",
    "twinkle_core:DeviceMesh.to_torch_device_mesh": "",
    "twinkle_core:DeviceMesh.get_data_rank_from_global_rank": "global_rank",
    "twinkle_core:DeviceMesh.get_slice": "total_length rank",
    "twinkle_core:DeviceMesh.get_tp_ranks": "",
    "twinkle_core:DeviceMesh.get_tp_last_ranks": "",
    "twinkle_core:DeviceMesh.is_tp_last_rank": "rank",
    "twinkle_core:DeviceMesh.is_pp_first_rank": "",
    "twinkle_core:DeviceMesh.is_pp_last_rank": "",
    "twinkle_core:DeviceMesh.get_pp_stage_ranks": "stage",
    "twinkle_core:DeviceMesh.get_pp_first_ranks": "",
    "twinkle_core:DeviceMesh.get_pp_last_ranks": "",
    "twinkle_core:DeviceMesh.get_collect_ranks": "",
    "twinkle_core:DeviceMesh.has_dim": "dim_name",
    "twinkle_core:DeviceMesh.get_dim_size": "dim_name",
    "twinkle_core:DeviceGroup": "name ranks device_type gpus_per_worker visible_devices",
    "twinkle_core.processor:InputProcessor": "device_mesh padding_free framework padding_side",
    "twinkle_core.model:TransformersModel": "model_cls model_id config device_mesh mixed_precision strategy ddp_config fsdp_config "
    "grad_scaler_config memory_efficient_init remote_group",
    "twinkle_core.model:TransformersModel.forward": "inputs adapter_name temperature return_logits",
    "twinkle_core.model:TransformersModel.forward_only": "inputs adapter_name disable_lora temperature return_logits task",
    "twinkle_core.model:TransformersModel.calculate_loss": "adapter_name",
    "twinkle_core.model:TransformersModel.backward": "adapter_name",
    "twinkle_core.model:TransformersModel.forward_backward": "inputs adapter_name micro_batch_size",
    "twinkle_core.model:TransformersModel.clip_grad_norm": "max_grad_norm norm_type adapter_name gradient_accumulation_steps",
    "twinkle_core.model:TransformersModel.clip_grad_and_step": "max_grad_norm norm_type adapter_name gradient_accumulation_steps",
    "twinkle_core.model:TransformersModel.step": "adapter_name gradient_accumulation_steps",
    "twinkle_core.model:TransformersModel.zero_grad": "adapter_name gradient_accumulation_steps",
    "twinkle_core.model:TransformersModel.lr_step": "adapter_name",
    "twinkle_core.model:TransformersModel.set_loss": "loss_cls adapter_name",
    "twinkle_core.model:TransformersModel.set_optimizer": "optimizer_cls adapter_name",
    "twinkle_core.model:TransformersModel.set_lr_scheduler": "scheduler_cls adapter_name",
    "twinkle_core.model:TransformersModel.apply_patch": "patch_cls",
    "twinkle_core.model:TransformersModel.save": "name output_dir interval adapter_name save_optimizer consumed_train_samples",
    "twinkle_core.model:TransformersModel.load": "name output_dir load_optimizer adapter_name",
    "twinkle_core.model:TransformersModel.resume_from_checkpoint": "checkpoint_dir resume_only_model adapter_name",
    "twinkle_core.model:TransformersModel.get_state_dict": "adapter_name",
    "twinkle_core.model:TransformersModel.get_peft_config_dict": "adapter_name",
    "twinkle_core.model:TransformersModel.calculate_metric": "is_training adapter_name",
    "twinkle_core.model:TransformersModel.add_adapter_to_model": "adapter_name config_or_dir gradient_accumulation_steps is_trainable",
    "twinkle_core.model:TransformersModel.set_template": "template_cls adapter_name",
    "twinkle_core.model:TransformersModel.set_processor": "processor_cls adapter_name",
    "twinkle_core.model:TransformersModel.set_grad_scaler": "adapter_name",
    "twinkle_core.model:TransformersModel.add_metric": "metric_cls is_training adapter_name",
    "twinkle_core.model:TransformersModel.get_train_configs": "adapter_name",
    "twinkle_core.model:TransformersModel.upload_to_hub": "checkpoint_dir hub_model_id hub_token async_upload",
    "twinkle_core.loss:CrossEntropyLoss": "ignore_index reduction dft",
    "twinkle_core.loss:ChunkedCrossEntropyLoss": "chunk_size ignore_index reduction dft",
    "twinkle_core.loss:LigerFusedLinearCrossEntropyLoss": "ignore_index reduction label_smoothing softcap",
    "twinkle_core.loss:MSELoss": "",
    "twinkle_core.loss:GKDLoss": "beta temperature ignore_index chunk_size",
    "twinkle_core.loss:GRPOLoss": "epsilon epsilon_high beta entropy_coef ignore_index",
    "twinkle_core.loss:GSPOLoss": "epsilon epsilon_high beta entropy_coef ignore_index",
    "twinkle_core.loss:SAPOLoss": "epsilon beta tau_pos tau_neg ignore_index",
    "twinkle_core.loss:CISPOLoss": "epsilon epsilon_high beta entropy_coef ignore_index",
    "twinkle_core.loss:BNPOLoss": "epsilon epsilon_high beta entropy_coef ignore_index",
    "twinkle_core.loss:DRGRPOLoss": "epsilon beta max_completion_length ignore_index",
    "twinkle_core.loss:DPOLoss": "beta label_smoothing ignore_index loss_type reference_free sft_weight",
    "twinkle_core.loss:SimPOLoss": "beta gamma ignore_index",
    "twinkle_core.loss:CPOLoss": "beta bc_coef ignore_index",
    "twinkle_core.loss:ORPOLoss": "lambda_orpo ignore_index",
    "twinkle_core.loss:InfonceLoss": "temperature use_batch hard_negatives mask_fake_negative fake_neg_margin include_qq "
    "include_dd process_group",
    "twinkle_core.metric:Accuracy": "device_mesh process_group",
    "twinkle_core.metric:LossMetric": "device_mesh process_group",
    "twinkle_core.metric:TrainMetric": "device_mesh process_group",
    "twinkle_core.metric:DPOMetric": "device_mesh process_group ignore_index beta",
    "twinkle_core.metric:GRPOMetric": "device_mesh process_group ignore_index temperature epsilon epsilon_high top_k_kl",
    "twinkle_core.metric:GSPOMetric": "device_mesh process_group ignore_index temperature epsilon epsilon_high top_k_kl",
    "twinkle_core.metric:CISPOMetric": "device_mesh process_group ignore_index temperature epsilon epsilon_high top_k_kl",
    "twinkle_core.metric:EmbeddingMetric": "device_mesh process_group",
    "twinkle_core.metric:CompletionRewardMetric": "device_mesh process_group",
    "twinkle_core.patch:Patch": "",
    "twinkle_core.patch:Patch.unpatch": "module",
    "twinkle_core.patch:apply_patch": "module",
    "twinkle_core.patch:apply_context": "module",
}
"""Where it is here → Twinkle's arguments, those included that it takes out of `**kwargs`."""
LOSS_INPUTS = "advantages old_logps ref_logps ref_outputs teacher_logits teacher_topk_logprobs teacher_topk_indices"
"""What Twinkle's losses take by keyword, through `forward_backward`."""
NOT_TAKEN = {"step": ("optim_params",), "forward_only": ("router_replay_action",), "forward_backward": ("ref_chosen_logps", "topk")}
"""Methods of the model → arguments that Twinkle takes and that are refused."""


def found(place: str) -> Any:
    module, _, path = place.partition(":")
    value: Any = import_module(module)
    for name in path.split("."):
        value = getattr(value, name)
    return value


def refuses(place: str, argument: str) -> bool:
    """Metrics are made by name, and say which arguments they know."""
    build: Callable[[Any, Any], Any] = build_metric if place.startswith("twinkle_core.metric") else build_loss
    with pytest.raises(ConfigError, match=f"takes no '{argument}'; known: "):
        build(place.partition(":")[2], {argument: None})
    return True


@pytest.mark.parametrize("place", SIGNATURES)
def test_a_name_is_there_and_takes_its_arguments_or_says_that_it_does_not(place: str) -> None:
    taken = inspect.signature(found(place)).parameters
    missing = [argument for argument in SIGNATURES[place].split() if argument not in taken]
    if place.startswith("twinkle_core.metric"):  # workers' sums are added up by the model: no metric talks to others
        assert set(missing) <= {"device_mesh", "process_group", "ignore_index", "temperature", "top_k_kl"}
        assert all(refuses(place, argument) for argument in missing)
    else:
        assert missing == []


def test_what_losses_take_by_keyword_is_known_by_twinkles_names(tmp_path: Path) -> None:
    model = TransformersModel(save_model(tmp_path, "llama"))
    model.set_optimizer("SGD", lr=0.0)
    rows = batch(2)
    for name in LOSS_INPUTS.split():
        with pytest.raises(ConfigError, match="has 1 entries for 2 rows|ref_outputs are what"):  # the name was understood
            model.forward_backward(rows, **{name: [0.0]})
    for method, arguments in NOT_TAKEN.items():
        for argument in arguments:
            given = () if method == "step" else (rows,)
            with pytest.raises((ConfigError, TypeError), match=f"{argument}"):
                getattr(model, method)(*given, **{argument: [0.0, 0.0]})


def test_reference_outputs_are_the_reference_log_probabilities(tmp_path: Path) -> None:
    from dataclasses import replace

    import numpy as np

    from twinkle_core.types import DocumentKind

    model = TransformersModel(save_model(tmp_path, "llama"))
    model.set_optimizer("SGD", lr=0.0)
    model.set_loss("DPOLoss")
    rows = [replace(packed_row(5, 6), kinds=np.array([int(DocumentKind.CHOSEN), int(DocumentKind.REJECTED)], dtype=np.int8))]
    reference = model.forward_only(rows, disable_lora=True, return_logps=True)
    assert model.forward_backward(rows, ref_outputs=reference).loss == pytest.approx(np.log(2), rel=1e-6)  # the policy is its reference
    with pytest.raises(ConfigError, match="ref_outputs are what forward_only"):
        model.forward_backward(rows, ref_outputs=model.forward_only(rows))


def test_a_processor_and_a_drawing_take_twinkles_arguments() -> None:
    from twinkle_core import DeviceGroup, get_device_placement
    from twinkle_core.processor import InputProcessor

    plain = InputProcessor().collate(batch(2))
    for padding_free in (True, False):
        made = InputProcessor(padding_free=padding_free, framework="transformers", padding_side="left").collate(batch(2))
        assert made["input_ids"].tolist() == plain["input_ids"].tolist()
    with pytest.raises(ConfigError, match="framework is 'megatron'; known: transformers"):
        InputProcessor(framework="megatron")
    with pytest.raises(ConfigError, match="padding_side is 'up'"):
        InputProcessor(padding_side="up")  # type: ignore[arg-type]
    drawn = get_device_placement([DeviceGroup("model", 2, "CPU"), DeviceGroup("data", 1, "CPU")])
    assert "group 'model': 2 worker(s) on cpu 0-1" in drawn and "group 'data'" in drawn
    assert "group 'data'" not in get_device_placement(DeviceGroup("model", 2, "CPU"))

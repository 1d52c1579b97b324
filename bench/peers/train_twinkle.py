"""A step of twinkle-kit's TransformersModel on a padded batch. Arguments: FILE.jsonl MODEL_FOLDER lora|full SHIM_FOLDER.

twinkle-kit has no CPU platform: SHIM_FOLDER holds `twinkle_cpu_shim.py`, whose `shim()` answers 'cpu' when it asks for its device.
It turns gradient checkpointing on by itself, and that is left so.
"""

import sys
from importlib.metadata import version
from typing import Any

from answer import serve
from train_settings import LR, MAX_NORM, PADDED_ROWS, ROW_LENGTH, conversations, lora_config


def main() -> None:
    import datasets
    import torch
    import twinkle
    from twinkle.dataloader import DataLoader
    from twinkle.dataset import Dataset, DatasetMeta
    from twinkle.model import TransformersModel

    file, folder, mode, shim_folder = sys.argv[1:]
    sys.path.append(shim_folder)
    from twinkle_cpu_shim import shim

    shim()
    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    twinkle.initialize(mode="local")
    dataset = Dataset(DatasetMeta(data=datasets.Dataset.from_list(conversations(file))))
    dataset.set_template("Template", model_id=folder, max_length=ROW_LENGTH)
    dataset.encode()
    batches = iter(DataLoader(dataset=dataset, batch_size=PADDED_ROWS, min_batch_size=1, num_workers=0))
    model = TransformersModel(model_id=folder, mixed_precision="no")
    if mode == "lora":
        model.add_adapter_to_model("default", lora_config())
    model.set_optimizer(optimizer_cls="AdamW", lr=LR)
    versions = ", ".join(f"{name} {version(name)}" for name in ("twinkle-kit", "torch", "transformers", "peft"))

    def work() -> dict[str, Any]:
        batch = next(batches)
        lengths = [len(row["input_ids"]) for row in batch]
        supervised = sum(int((torch.as_tensor(row["labels"]) != -100).sum()) for row in batch)
        output = model.forward_backward(inputs=batch)
        model.clip_grad_and_step(MAX_NORM)
        facts = {"tokens": sum(lengths), "slots": len(lengths) * max(lengths), "supervised": supervised, "version": versions}
        return facts | {"loss": float(output["loss"]) / supervised}  # theirs is the sum

    serve(work)


if __name__ == "__main__":
    main()

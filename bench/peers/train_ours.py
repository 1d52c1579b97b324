"""A step of `TransformersModel` on a packed row of GSM8K. Arguments: FILE.jsonl MODEL_FOLDER lora|full."""

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from answer import serve
from train_rows import packed_rows
from train_settings import ALPHA, LR, MAX_NORM, RANK

from twinkle_core.config import LoraConfig
from twinkle_core.model.transformers import TransformersModel


def main() -> None:
    file, folder, mode = sys.argv[1:]
    torch.set_num_threads(1)
    rows = iter(packed_rows(Path(file), Path(folder)))
    model = TransformersModel(folder, mixed_precision="no")
    if mode == "lora":
        model.add_adapter_to_model("default", LoraConfig(rank=RANK, alpha=ALPHA))
    model.set_optimizer("AdamW", lr=LR)

    def work() -> dict[str, Any]:
        row = next(rows)
        output = model.forward_backward([row])
        model.clip_grad_and_step(MAX_NORM)
        facts = {"tokens": len(row.input_ids), "slots": len(row.input_ids), "supervised": row.num_loss_tokens, "loss": output.loss}
        return facts | {"version": f"torch {version('torch')}, transformers {version('transformers')}, peft {version('peft')}"}

    serve(work)


if __name__ == "__main__":
    main()

"""TRL's SFTTrainer packed to 8192 with SDPA and Liger on one GPU, the shapes and documents of `bench/gpu_step.py`. Prints JSON lines.

python bench/peers/trl_gpu_step.py 1.7B BATCH CHECKPOINTING      # rows a micro-batch, 0 or 1; 16,384 tokens a step
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from gpu_step import ROW, STEP_TOKENS, VOCABULARY, make_model, packed_rows

STEPS, WARM_UP = 5, 3


def main() -> None:
    shape, batch, checkpointing = sys.argv[1], int(sys.argv[2]), bool(int(sys.argv[3]))
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    rng = np.random.default_rng(0)
    lengths = [length for row in packed_rows((STEPS + WARM_UP + 2) * STEP_TOKENS // ROW) for length in row]
    rows = Dataset.from_dict({"input_ids": [rng.integers(3, VOCABULARY, length).tolist() for length in lengths]})
    model = make_model(shape)
    model.config._attn_implementation = "sdpa"
    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            times.append(time.perf_counter() - self.began)

    settings = SFTConfig(
        "/tmp/trl", max_steps=STEPS + WARM_UP, per_device_train_batch_size=batch, gradient_accumulation_steps=STEP_TOKENS // ROW // batch,
        max_length=ROW, packing=True, packing_strategy="bfd", bf16=True, gradient_checkpointing=checkpointing, use_liger_kernel=True,
        report_to=[], save_strategy="no", logging_steps=100, optim="adamw_torch_fused", learning_rate=1e-5, disable_tqdm=True,
    )  # fmt: skip
    trainer = SFTTrainer(model, args=settings, train_dataset=rows, processing_class=tokenizer, callbacks=[Clock()])
    packed = [len(row) for row in trainer.train_dataset["input_ids"]]
    trainer.train()
    tokens = statistics.mean(packed) * STEP_TOKENS / ROW
    seconds = statistics.median(times[WARM_UP:])
    found = {
        "peer": "TRL packed, SDPA, Liger", "shape": shape, "rows": batch, "checkpointing": checkpointing,
        "tokens_per_second": tokens / seconds,
        "step_ms": seconds * 1e3, "peak_gib": torch.cuda.max_memory_allocated() / 2**30, "mean_row_tokens": statistics.mean(packed),
    }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main()

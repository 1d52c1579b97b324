"""A step of TRL's SFTTrainer. Arguments: FILE.jsonl MODEL_FOLDER lora|full default|packed.

`default`: padded batches and gradient checkpointing, as TRL has it. `packed`: its best-fit-decreasing packing, without checkpointing,
which is faster here. What is timed lies between two ends of a step: collating, forward, backward, clipping, the optimizer, the log.
"""

import sys
import tempfile
from importlib.metadata import version
from typing import Any

from answer import Asker
from encode_trl import MARKED
from train_settings import LR, MAX_NORM, PADDED_ROWS, ROW_LENGTH, conversations, lora_config


def main() -> None:
    import datasets
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    file, folder, mode, form = sys.argv[1:]
    torch.set_num_threads(1)
    datasets.disable_caching()
    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = MARKED
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    packed = form == "packed"
    batches: list[dict[str, Any]] = []
    losses = [0.0]

    class Answering(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.asker = Asker()
            self.asker.wait()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            batch = batches[state.global_step - 1]
            ids = batch["input_ids"]
            tokens = int(batch["attention_mask"].sum()) if "attention_mask" in batch else ids.numel()
            supervised = int((batch["labels"] != -100).sum())
            versions = ", ".join(f"{name} {version(name)}" for name in ("trl", "torch", "transformers", "peft"))
            facts = {"tokens": tokens, "slots": ids.numel(), "supervised": supervised, "loss": losses[-1], "version": versions}
            self.asker.answer(facts)
            self.asker.wait()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            losses.append(float((logs or {}).get("loss", losses[-1])))

    with tempfile.TemporaryDirectory() as out:
        arguments = SFTConfig(
            output_dir=out, per_device_train_batch_size=1 if packed else PADDED_ROWS, max_steps=100, learning_rate=LR,
            max_grad_norm=MAX_NORM, assistant_only_loss=True, max_length=ROW_LENGTH, packing=packed, report_to=[], save_strategy="no",
            logging_steps=1, use_cpu=True, bf16=False, disable_tqdm=True, **({"gradient_checkpointing": False} if packed else {}),
        )  # fmt: skip
        trainer = SFTTrainer(
            model=model, args=arguments, train_dataset=datasets.Dataset.from_list(conversations(file)), processing_class=tokenizer,
            peft_config=lora_config() if mode == "lora" else None, callbacks=[Answering()],
        )  # fmt: skip
        collate = trainer.data_collator

        def kept(examples: Any) -> Any:
            batches.append(collate(examples))
            return batches[-1]

        trainer.data_collator = kept
        trainer.train()


if __name__ == "__main__":
    main()

"""TRL's preparation of a data set for training on the assistant's turns. Arguments: FILE.jsonl MODEL_FOLDER MAX_LENGTH NUM_PROC.

Only the preparation inside SFTTrainer is timed, with a two-layer model that is made beforehand. It needs a chat template with
generation marks, so the model's own is replaced by the same one with marks.
"""

import json
import sys
import tempfile
import time
from typing import Any

from answer import cpu_seconds, serve

SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
MARKED = (
    "{%- if messages[0].role != 'system' %}{{ '" + SYSTEM.replace("\n", "\\n") + "' }}{%- endif %}"
    "{%- for turn in messages %}{{ '<|im_start|>' ~ turn.role ~ '\\n' }}"
    "{%- if turn.role == 'assistant' %}{% generation %}{{ turn.content ~ '<|im_end|>' }}{% endgeneration %}"
    "{%- else %}{{ turn.content ~ '<|im_end|>' }}{%- endif %}{{ '\\n' }}{%- endfor %}"
)


def main() -> None:
    import datasets
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    file, model_folder, max_length, num_proc = sys.argv[1:]
    datasets.disable_caching()
    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokenizer.chat_template = MARKED
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape))
    with open(file, encoding="utf-8") as lines:
        rows = datasets.Dataset.from_list([{"messages": json.loads(line)["messages"]} for line in lines])
    spent: dict[str, float] = {}

    class Timed(SFTTrainer):
        def _prepare_dataset(self, *arguments: Any, **options: Any) -> Any:
            began, cpu_began = time.perf_counter(), cpu_seconds()
            prepared = super()._prepare_dataset(*arguments, **options)
            spent.update(seconds=time.perf_counter() - began, cpu_seconds=cpu_seconds() - cpu_began)
            return prepared

    def work() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as out:
            arguments = SFTConfig(
                output_dir=out, assistant_only_loss=True, max_length=int(max_length), report_to=[], use_cpu=True, bf16=False,
                dataset_num_proc=None if num_proc == "1" else int(num_proc),
            )  # fmt: skip
            prepared = Timed(model=model, args=arguments, train_dataset=rows, processing_class=tokenizer).train_dataset
        tokens = sum(len(ids) for ids in prepared["input_ids"])
        if "labels" in prepared.column_names:
            supervised = sum(sum(label != -100 for label in labels) for labels in prepared["labels"])
        else:
            supervised = sum(map(sum, prepared["assistant_masks"]))
        return {**spent, "rows": len(prepared), "tokens": tokens, "supervised": supervised}

    serve(work)


if __name__ == "__main__":
    main()

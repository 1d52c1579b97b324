"""The matrix products that a step on our packed row cannot do without, and nothing else. Arguments: FILE.jsonl MODEL_FOLDER lora|full.

Of each linear layer: the output, the input's gradient and, for `full`, the weight's: 4 or 6 operations a parameter and token.
The head's on supervised positions alone. No attention, no LoRA, no first layer's exception. Each layer has weights of its own, as in a
model, so that they come from memory; six layers are done, and counted five times. `cpu_seconds` are those of torch's own product
(`torch.mm`), `onednn_cpu_seconds` those of oneDNN's where the CPU has it, which torch does not use for float32 matrices by itself.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from answer import serve
from train_rows import packed_rows

LAYERS_DONE = 6
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def main() -> None:
    file, folder, mode = sys.argv[1:]
    torch.set_num_threads(1)
    rows = iter(packed_rows(Path(file), Path(folder)))
    config = json.loads((Path(folder) / "config.json").read_text())
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    keys = hidden // heads * config["num_key_value_heads"]
    shapes = [(hidden, hidden), (keys, hidden), (keys, hidden), (hidden, hidden), (inner, hidden), (inner, hidden), (hidden, inner)]
    layers = [[torch.randn(shape) for shape in shapes] for _ in range(LAYERS_DONE)]
    head = torch.randn(config["vocab_size"], hidden)
    times = config["num_hidden_layers"] / LAYERS_DONE

    def seconds(product: Product, tokens: int, supervised: int) -> float:
        inputs = {width: torch.randn(tokens, width) for width in {hidden, inner, keys}}
        states, logits = torch.randn(supervised, hidden), torch.randn(supervised, len(head))
        began = time.process_time()
        for layer in layers:
            for weight in layer:
                three_products(product, inputs[weight.shape[1]], weight, inputs[weight.shape[0]], mode)
        middle = time.process_time()
        three_products(product, states, head, logits, mode)
        return times * (middle - began) + time.process_time() - middle

    def work() -> dict[str, Any]:
        row = next(rows)
        tokens, supervised = len(row.input_ids), row.num_loss_tokens
        parameters = config["num_hidden_layers"] * sum(out * into for out, into in shapes)
        operations = (4 if mode == "lora" else 6) * (parameters * tokens + head.numel() * supervised)
        spent = seconds(torch.mm, tokens, supervised)
        facts = {"tokens": tokens, "slots": tokens, "supervised": supervised, "cpu_seconds": spent, "gflops": operations / spent / 1e9}
        if torch.backends.mkldnn.is_available():
            facts["onednn_cpu_seconds"] = seconds(onednn, tokens, supervised)
        return facts

    serve(work)


def three_products(product: Product, inputs: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, mode: str) -> None:
    product(inputs, weight.T)
    product(grad, weight)
    if mode == "full":
        product(grad.T, inputs)


def onednn(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(left, right.T, None, "none", [], "")
    return result


if __name__ == "__main__":
    main()

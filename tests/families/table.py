"""The table of supported models, made from what the checks found: `python -m tests.families.table` writes docs/supported-models.md."""

from __future__ import annotations

from pathlib import Path

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.families.checks import CHECKS, outcome
from tests.families.families import FAMILIES, REFUSED

PAGE = Path(__file__).resolve().parents[2] / "docs" / "supported-models.md"
HEAD = """# Supported models

This table is written by `python -m tests.families.table`, and tests hold it to what they find: each family, as a tiny random model of its
real architecture in transformers' own code (no code of a model's folder is ever run), goes through

- *LoRA*, *full*: steps lower the loss and move every trained tensor, and no other; *experts*: LoRA on all experts, by peft's
  `target_parameters` (`peft.LoraConfig(target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], …)`);
- *packed*: a document in a packed row has the logits it has alone and under the model's own attention, to 1e-5 of the largest logit, in
  training and evaluation, and no gradient reaches its neighbours;
- *resume*: saved and resumed equals uninterrupted to the bit, LoRA and full;
- *export*: merged and adapter folders load by transformers and peft with the live model's logits; tied embeddings lie in the file once.

"""
TAIL = """
Of mixtures of experts, only the token losses are learnt: the router's auxiliary loss is off whatever the config says
(`output_router_logits`, `router_aux_loss_coef`), and balancing biases that transformers does not train (DeepSeek-V3) stay as they are.
LoRA on experts knows no dropout. Such an adapter was not tried in vLLM: export it merged for there.

Quantized weights (FP8 of DeepSeek-V3, MXFP4 of gpt-oss) are refused: convert them to plain weights first.
vLLM 0.32 names every class of this table in its registry (GLM-4-9B runs there through its transformers backend), and folders hold the
tensor names of the published models; the folders were not run in it.
"""
REFUSED_HEAD = """
## Refused

| model | type | reason |
| --- | --- | --- |
"""


def row(name: str) -> str:
    family = FAMILIES[name]
    cells = [family.covers, f"`{MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family.model_type]}`"]
    for check in CHECKS:
        found = outcome(name, check)
        cells.append("yes" if found is None else "–" if found == "no experts" else "no")
    return "| " + " | ".join([*cells, family.remark]) + " |"


def page() -> str:
    titles = ["models", "class", *CHECKS, "remark"]
    lines = ["| " + " | ".join(titles) + " |", "| " + " | ".join("---" for _ in titles) + " |"]
    refused = "".join(f"| {one.covers} | `{one.config['model_type']}` | {one.reason} |\n" for one in REFUSED.values())
    return HEAD + "\n".join([*lines, *(row(name) for name in FAMILIES)]) + "\n" + TAIL + REFUSED_HEAD + refused


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

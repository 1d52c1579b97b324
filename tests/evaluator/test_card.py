from __future__ import annotations

from typing import Any

import pytest
import yaml

from twinkle_core.errors import DataError
from twinkle_core.evaluator.card import render_card


def result(loss: float) -> dict[str, Any]:
    row = {"loss": loss, "token_accuracy": 0.5, "answer_accuracy": None}
    return {"numbers": {"all": row, "by_source": {"sums|evil": row}}}


def card(**changes: Any) -> str:
    arguments: dict[str, Any] = {
        "name": "ada",
        "base_model": "org/base",
        "base_model_uri": "hf://org/base@abc",
        "form": "merged",
        "datasets": ["sums", "yes"],
        "before": result(2.0),
        "after": result(1.0),
        "training": {"lora rank": 8, "lr": 1e-4},
        "lineage": {"export": "ab" * 32},
    }
    return render_card(**(arguments | changes))


def test_the_front_matter_is_yaml_with_the_values_given() -> None:
    _, front, body = card().split("---\n", 2)
    values = yaml.safe_load(front)
    assert values["base_model"] == "org/base"
    assert values["library_name"] == "transformers"
    assert values["base_model_relation"] == "finetune"
    assert values["datasets"] == ["sums", "yes"]
    assert "lora" in values["tags"]
    assert "| all | 2.0000 | 1.0000 | 50.0% | 50.0% | – | – |" in body
    assert "sums\\|evil" in body
    assert f"`{'ab' * 32}`" in body


def test_no_value_can_end_the_front_matter() -> None:
    name = 'x"\n---\nevil: true'
    _, front, _ = card(base_model=name, name="n").split("---\n", 2)[0:3]
    assert "evil" not in (yaml.safe_load(card(base_model="a: b # c", name="n").split("---\n")[1]) or {})
    assert yaml.safe_load(front)["base_model"] == name


def test_an_adapter_says_what_it_is() -> None:
    values = yaml.safe_load(card(form="adapter").split("---\n", 2)[1])
    assert (values["library_name"], values["base_model_relation"]) == ("peft", "adapter")


@pytest.mark.parametrize("path", ["/scratch/user1/run42/base", "/home/me/base", "C:\\Users\\me", "~/base", "file:///data/x"])
@pytest.mark.parametrize("field", ["base_model", "base_model_uri"])
def test_a_local_path_stops_the_card(field: str, path: str) -> None:
    with pytest.raises(DataError, match="local path"):
        card(**{field: path})


def test_the_same_arguments_give_the_same_card() -> None:
    assert card() == card()

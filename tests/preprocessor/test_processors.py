from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from twinkle_core.errors import ConfigError, DataError
from twinkle_core.evaluator.scorers import score
from twinkle_core.preprocessor import (
    CLEVRProcessor,
    CompetitionMathGRPOProcessor,
    CompetitionMathProcessor,
    CountdownProcessor,
    DataFilter,
    EmojiDPOProcessor,
    GSM8KProcessor,
    OlympiadBenchProcessor,
    Preprocessor,
    SelfCognitionProcessor,
)
from twinkle_core.preprocessor.formats import convert, detect
from twinkle_core.preprocessor.reasoning import last_boxed
from twinkle_core.preprocessor.registry import PREPROCESSORS, build_filter, build_preprocessor
from twinkle_core.types import Trajectory, kind_of, user_data_get

GSM8K = {"question": "How many in all?", "answer": "48+24 = <<48+24=72>>72 in all.\n#### 1,072"}
MATH = {"problem": "Half?", "solution": r"So \boxed{x}, no: $\boxed{\frac{1}{2}}$.", "level": "Level 1", "type": "Algebra"}
OLYMPIAD = {
    "question": "See <image_2> and <image_1>. Solve.",
    "context": "Let x = 1.",
    "final_answer": ["12"],
    "image_1": "a.png",
    "image_2": "b.png",
    "answer_type": "Numerical",
    "unit": None,
    "is_multiple_answer": False,
}
ROWS: dict[str, Any] = {
    "SelfCognitionProcessor": ({"query": "Who?", "response": "I am {name} of {author}."}, {"name": "Brook", "author": "Hill"}),
    "AlpacaProcessor": ({"instruction": "i", "input": "x", "output": "o"}, {}),
    "CompetitionMathProcessor": (MATH, {}),
    "CompetitionMathGRPOProcessor": (MATH, {}),
    "CountdownProcessor": ({"nums": [3, 5, 7], "target": 36}, {}),
    "GSM8KProcessor": (GSM8K, {"add_assistant": True}),
    "CLEVRProcessor": ({"image": "a.png", "problem": "How many?", "solution": "<answer> 3 </answer>"}, {}),
    "OlympiadBenchProcessor": (OLYMPIAD, {"language": "en"}),
    "EmojiDPOProcessor": ({"prompt": "q", "answer_zh": "zh", "answer_en": "en"}, {}),
}


def said(trajectory: Trajectory) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in trajectory["messages"]]


@pytest.mark.parametrize("name", PREPROCESSORS)
def test_each_makes_a_trajectory_whose_user_data_is_text_and_whose_scorer_takes_its_own_answer(name: str) -> None:
    row, arguments = ROWS[name]
    processor = build_preprocessor(name, arguments)
    assert processor is not None
    made: Any = processor(row)
    trajectory = processor.annotate(convert(made, "trajectory" if "messages" in made else detect(made)))
    user_data = trajectory.get("user_data", [])
    assert all(isinstance(key, str) and isinstance(value, str) for key, value in user_data)
    scorer, answer = user_data_get(trajectory, "scorer"), user_data_get(trajectory, "answer")
    if scorer is not None and answer is not None:
        assert score(scorer, answer, answer)
    assert json.loads(json.dumps(row)) == row, "the row was changed"


@pytest.mark.parametrize(
    ("add_assistant", "turns", "kind"),
    [(False, [("user", "How many in all?")], "prompt"),
     (True, [("user", "How many in all?"), ("assistant", GSM8K["answer"])], "conversation")],
)  # fmt: skip
def test_gsm8k_is_a_prompt_or_an_exchange_with_the_number_as_answer(add_assistant: bool, turns: Any, kind: str) -> None:
    made = GSM8KProcessor(system="", add_assistant=add_assistant)(GSM8K)
    assert (said(made), kind_of(made)) == (turns, kind)
    assert made["user_data"] == [("ground_truth", "1072"), ("scorer", "last_number"), ("answer", "1072")]
    assert said(GSM8KProcessor("Be brief.")(GSM8K))[0] == ("system", "Be brief.")
    assert "####" in said(GSM8KProcessor()(GSM8K))[0][1]


def test_competition_math_is_an_exchange_and_its_grpo_form_a_prompt_with_the_solution() -> None:
    exchange, prompt = CompetitionMathProcessor()(MATH), CompetitionMathGRPOProcessor(system="")(MATH)
    assert said(exchange) == [("user", "Half?"), ("assistant", MATH["solution"])]
    assert said(prompt) == [("user", "Half?")]
    assert prompt["user_data"] == [("ground_truth", r"\frac{1}{2}"), ("answer", r"\frac{1}{2}"), ("solution", MATH["solution"])]


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"\boxed{5}", "5"),
        (r"a \boxed{\text{x}^{2}} b", r"\text{x}^{2}"),
        (r"\boxed{1} \boxed{2}", "2"),
        ("none", None),
        (r"\boxed{1", None),
    ],
)
def test_the_last_box_is_read_with_balanced_braces(text: str, boxed: str | None) -> None:
    assert last_boxed(text) == boxed


def test_countdown_keeps_numbers_and_target_for_the_reward_and_names_no_scorer() -> None:
    made = CountdownProcessor(system="")({"nums": [3, 5, 7], "target": 36})
    assert made["user_data"] == [("ground_truth", "36"), ("target", "36"), ("nums", "[3, 5, 7]")]
    assert "3, 5, 7" in made["messages"][0]["content"]
    assert "36" in made["messages"][0]["content"]


def test_clevr_shows_its_image_first_and_reads_the_tagged_answer() -> None:
    made = CLEVRProcessor(system="")({"image": "a.png", "problem": "How many?", "solution": "<answer> yes </answer>"})
    assert (said(made), made["images"]) == ([("user", "<image>How many?")], ["a.png"])
    assert made["user_data"] == [("ground_truth", "yes"), ("answer", "yes"), ("solution", "<answer> yes </answer>")]
    assert CLEVRProcessor.extract_ground_truth("<answer>1</answer> <answer>2</answer>") == "2"


def test_olympiad_images_follow_the_text_and_proofs_are_left_out() -> None:
    made = OlympiadBenchProcessor(system="")(OLYMPIAD)
    assert made is not None
    assert said(made) == [("user", "Let x = 1.\n\nSee <image> and <image>. Solve.")]
    assert made["images"] == ["b.png", "a.png"]
    assert dict(made["user_data"]) == {
        "ground_truth": "12", "scorer": "last_number", "answer": "12", "final_answer": '["12"]',
        "answer_type": "Numerical", "is_multiple_answer": "false",
    }  # fmt: skip
    assert OlympiadBenchProcessor()({**OLYMPIAD, "final_answer": None}) is None
    with pytest.raises(DataError, match="shows image 3"):
        OlympiadBenchProcessor()({**OLYMPIAD, "question": "<image_3>"})


def test_emoji_dpo_is_a_pair_after_one_prompt() -> None:
    made = EmojiDPOProcessor(system="s", prompt_key="question")({"question": "q", "answer_zh": "zh", "answer_en": "en"})
    assert said(made) == [("system", "s"), ("user", "q"), ("assistant", "zh")]
    assert made["rejected_messages"] == [*made["messages"][:2], {"role": "assistant", "content": "en"}]


def test_all_spellings_of_the_placeholders_are_filled() -> None:
    for fill in (
        SelfCognitionProcessor("B", "H"),
        SelfCognitionProcessor(name="B", author="H"),
        SelfCognitionProcessor(model_name="B", model_author="H"),
    ):
        assert fill({"a": "{name} {{NAME}} {{name}}", "b": [{"c": "{author} {{AUTHOR}} {other}"}]}) == {
            "a": "B B B",
            "b": [{"c": "H H {other}"}],
        }


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("GSM9K", {}, "unknown processor 'GSM9K'; known: SelfCognitionProcessor, .*GSM8KProcessor"),
        ("GSM8KProcessor", {"assistant": True}, "takes no argument 'assistant'; it takes system, add_assistant"),
        ("SelfCognitionProcessor", {"name": "B"}, "'author' .*is missing"),
        ("SelfCognitionProcessor", {"name": "B", "model_name": "C", "author": "H"}, "'name' .*is given twice"),
        ("SelfCognitionProcessor", {"name": " ", "author": "H"}, "'name' .*is ' '"),
        ("OlympiadBenchProcessor", {"language": "fr"}, "language 'fr' is unknown; known: en, zh"),
        (None, {"name": "B"}, "but no processor"),
    ],
)
def test_names_and_arguments_that_mean_nothing_are_refused(name: str | None, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_preprocessor(name, arguments)


@pytest.mark.parametrize(
    ("processor", "row", "message"),
    [
        (GSM8KProcessor(), {"question": "q", "answer": "72"}, "no number after '####'"),
        (GSM8KProcessor(), {"answer": "#### 72"}, "'question' must be text"),
        (CountdownProcessor(), {"nums": ["1"], "target": 1}, "'nums' must be a list of whole numbers"),
        (CountdownProcessor(), {"nums": [1], "target": 1.5}, "'target' must be a whole number"),
        (CompetitionMathGRPOProcessor(), {"problem": "p", "solution": "s"}, "no .boxed"),
        (CLEVRProcessor(), {"problem": "p", "solution": "s"}, "no 'image'"),
        (EmojiDPOProcessor(), {"question": "q"}, "'prompt' must be text"),
    ],
)
def test_rows_that_are_not_of_the_data_set_are_refused(processor: Preprocessor, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        processor(row)


def shout(row: Any, mark: str = "!") -> dict[str, Any]:
    return {"query": row["query"] + mark, "response": row["response"]}


def test_functions_classes_and_instances_are_taken_as_they_are() -> None:
    row = {"query": "a", "response": "b"}
    for given, arguments in ((shout, {}), (shout, {"mark": "?"}), (SelfCognitionProcessor("B", "H"), {})):
        built = build_preprocessor(given, arguments)
        assert built is not None
        expected = row if isinstance(given, Preprocessor) else shout(row, **arguments)
        assert built(row) == expected
    with pytest.raises(ConfigError, match="cannot be called with a row and the arguments"):
        build_preprocessor(shout, {"loud": 1})
    for own in (dict, max):  # they have no signature to look at
        for build in (build_preprocessor, build_filter):
            with pytest.raises(ConfigError, match="(dict|max) does not tell what it can be called with; write a function of your own"):
                build(own)
    for base, build in ((Preprocessor, build_preprocessor), (DataFilter, build_filter)):
        with pytest.raises(ConfigError, match=f"{base.__name__} lacks the method __call__"):
            build(base)  # type: ignore[operator]
    assert build_filter(lambda trajectory: True)({"messages": []})
    with pytest.raises(ConfigError, match=r"returned 1; it has to return True \(keep\) or False"):
        build_filter(lambda trajectory: 1)({"messages": []})


def test_the_real_rows_of_gsm8k_all_become_prompts(shared_data: Path) -> None:
    rows = [json.loads(line) for line in (shared_data / "gsm8k" / "test.jsonl").open(encoding="utf-8")]
    made = [GSM8KProcessor()(row) for row in rows]
    assert len(made) == 1319
    assert all(score("last_number", row["answer"], str(user_data_get(one, "answer"))) for row, one in zip(rows, made, strict=True))

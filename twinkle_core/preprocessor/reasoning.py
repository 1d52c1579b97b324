"""Preprocessors of sets of problems with a checkable answer.

What is needed to check it lies in `user_data` as text: 'ground_truth' for rewards, 'scorer' and 'answer' for the evaluator.
Where a `system` argument is None the prompt here is used; '' uses none.
"""

from __future__ import annotations

import json
import re
from typing import Any

from twinkle_core.errors import ConfigError, DataError
from twinkle_core.preprocessor.base import Preprocessor
from twinkle_core.preprocessor.fields import Row, optional_text, short, text
from twinkle_core.preprocessor.instructions import question
from twinkle_core.preprocessor.judged_rows import scored
from twinkle_core.types import Trajectory

STEPS = "Work the problem out step by step. "
MARKED = STEPS + "Write the result, a number alone, on the last line after '#### '."
BOXED = STEPS + r"Put the final result into \boxed{}."
BOXED_IN = {"en": BOXED, "zh": "请逐步推理，" + r"并把最终结果写在 \boxed{} 中。"}
TAGGED = STEPS + "Think between <think> and </think>, then give only the result between <answer> and </answer>."


class CompetitionMathProcessor(Preprocessor):
    r"""`problem` and `solution` of MATH (https://arxiv.org/abs/2103.03874): an exchange to learn, its \boxed{} result as answer."""

    def __call__(self, row: Row) -> Trajectory:
        solution = text(row, "solution")
        trajectory: Trajectory = {
            "messages": [*question(text(row, "problem"), None), {"role": "assistant", "content": solution}],
        }
        boxed = last_boxed(solution)
        return trajectory if boxed is None else {**trajectory, "user_data": scored(boxed)}


class CompetitionMathGRPOProcessor(Preprocessor):
    """The same rows as prompts: the solution is kept in `user_data`, for a reward to compare with."""

    def __init__(self, system: str | None = None) -> None:
        self.system = BOXED if system is None else system

    def __call__(self, row: Row) -> Trajectory:
        problem, solution = text(row, "problem"), text(row, "solution")
        boxed = last_boxed(solution)
        if boxed is None:
            raise DataError(r"'solution' has no \boxed{} result to compare an answer with")
        return {"messages": question(problem, self.system), "user_data": [*scored(boxed), ("solution", solution)]}


class GSM8KProcessor(Preprocessor):
    """`question` and `answer` of GSM8K (https://arxiv.org/abs/2110.14168): a prompt, or with `add_assistant` an exchange to learn.

    The answer is the number after '####'; the worked answer is kept exactly, calculator marks (<<48/2=24>>) included.
    """

    def __init__(self, system: str | None = None, add_assistant: bool = False) -> None:
        self.system, self.add_assistant = MARKED if system is None else system, add_assistant

    def __call__(self, row: Row) -> Trajectory:
        worked, messages = text(row, "answer"), question(text(row, "question"), self.system)
        _, mark, number = worked.rpartition("####")
        if not mark or not number.strip():
            raise DataError(f"'answer' has no number after '####': {short(worked)}")
        if self.add_assistant:
            messages = [*messages, {"role": "assistant", "content": worked}]
        return {"messages": messages, "user_data": scored(number.strip().replace(",", ""), "last_number")}


class CountdownProcessor(Preprocessor):
    """`nums` and `target` of Countdown-Tasks: make the target from the numbers. 'nums' is kept as JSON text.

    There is no one answer, so the evaluator has no scorer for it: a reward checks the equation.
    """

    def __init__(self, system: str | None = None) -> None:
        self.system = TAGGED if system is None else system

    def __call__(self, row: Row) -> Trajectory:
        numbers, target = row.get("nums"), row.get("target")
        if not isinstance(numbers, list) or not numbers or not all(_is_integer(number) for number in numbers):
            raise DataError(f"'nums' must be a list of whole numbers, got {short(numbers)}")
        if not _is_integer(target):
            raise DataError(f"'target' must be a whole number, got {short(target)}")
        listed = ", ".join(str(number) for number in numbers)
        asked = f"Use each of the numbers {listed} exactly once, with + - * / and brackets, to write an equation that gives {target}."
        user_data = [("ground_truth", str(target)), ("target", str(target)), ("nums", json.dumps(numbers))]
        return {"messages": question(asked, self.system), "user_data": user_data}


class CLEVRProcessor(Preprocessor):
    """`image` (or `images`), `problem` and `solution` of the CLEVR counting sets; the answer stands in <answer> tags."""

    def __init__(self, system: str | None = None) -> None:
        self.system = TAGGED if system is None else system

    @staticmethod
    def extract_ground_truth(solution: str) -> str:
        """The text in the last <answer> tags, or the whole text where there are none."""
        tagged: list[str] = re.findall(r"<answer>(.*?)</answer>", solution, re.DOTALL)
        return (tagged or [solution])[-1].strip()

    def __call__(self, row: Row) -> Trajectory:
        solution = text(row, "solution")
        images = row["images"] if isinstance(row.get("images"), list) else [row.get("image")]
        if any(image is None for image in images):
            raise DataError("there is no 'image'")
        asked = "<image>" * len(images) + text(row, "problem").replace("<image>", "")
        user_data = [*scored(self.extract_ground_truth(solution)), ("solution", solution)]
        return {"messages": question(asked, self.system), "user_data": user_data, "images": images}


class OlympiadBenchProcessor(Preprocessor):
    """`question`, `context`, `final_answer` and `image_1`… of OlympiadBench (https://arxiv.org/abs/2402.14008): a prompt.

    Theorems to be proved have no final answer; they are left out. What a checker needs besides stays in `user_data`.
    """

    def __init__(self, system: str | None = None, language: str = "zh") -> None:
        if language not in BOXED_IN:
            raise ConfigError(f"OlympiadBenchProcessor: language {language!r} is unknown; known: {', '.join(BOXED_IN)}")
        self.system = BOXED_IN[language] if system is None else system

    def __call__(self, row: Row) -> Trajectory | None:
        answers = _list_of_texts(row, "final_answer")
        if not answers:
            return None
        asked = "\n\n".join(part for part in (optional_text(row, "context"), text(row, "question")) if part)
        asked, images = _numbered_images(asked, row)
        truth = "; ".join(answers)
        user_data = [*scored(truth), ("final_answer", json.dumps(answers, ensure_ascii=False))]
        for key in ("answer_type", "unit", "error", "is_multiple_answer", "subject"):
            if row.get(key) is not None:
                user_data.append((key, row[key] if isinstance(row[key], str) else json.dumps(row[key])))
        trajectory: Trajectory = {"messages": question(asked, self.system), "user_data": user_data}
        if images:
            trajectory["images"] = images
        return trajectory


def last_boxed(solution: str) -> str | None:
    r"""What stands in the last \boxed{}, braces balanced: '\frac{1}{2}' of '\boxed{\frac{1}{2}}'. None where there is none."""
    start = solution.rfind(r"\boxed{")
    depth = 0
    for place in range(start + len(r"\boxed"), len(solution)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(solution[place], 0)
        if not depth:
            return solution[start + len(r"\boxed{") : place].strip()
    return None


def _numbered_images(asked: str, row: Row) -> tuple[str, list[Any]]:
    """`<image_k>` as `<image>`, with the references in the order in which the text shows them; shown first where it shows none."""
    given = row["images"] if isinstance(row.get("images"), list) else None
    there = {number: row[f"image_{number}"] for number in range(1, 10) if row.get(f"image_{number}") is not None}
    if given is not None:
        there = dict(enumerate(given, start=1))
    shown = [int(number) for number in re.findall(r"<image_(\d+)>", asked)]
    if missing := [number for number in shown if number not in there]:
        raise DataError(f"the question shows image {missing[0]}, but the row has {sorted(there) or 'no images'}")
    unshown = [number for number in there if number not in shown]
    return "<image>" * len(unshown) + re.sub(r"<image_\d+>", "<image>", asked), [there[number] for number in unshown + shown]


def _list_of_texts(row: Row, key: str) -> list[str]:
    value = row.get(key)
    items = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise DataError(f"'{key}' must be text or a list of texts, got {short(value)}")
    return [item for item in items if item.strip()]


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

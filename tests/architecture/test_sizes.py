import ast

import pytest

from tests.architecture.sources import ROOT, Function, files, functions, name

MAX_MODULE_LINES = 300
MAX_STATEMENTS = 40
MAX_LOOP_LINES = 150
MAX_STAGE_LINES = 80
LONG_MODULES: dict[str, str] = {}
"""File → why it may be longer."""
LONG_FUNCTIONS: dict[str, str] = {}
"""'file name' → why it may be longer."""
LONG_STAGES: dict[str, str] = {
    "tasks/preprocess.py": "the user's own code is an input too, and whether a flow can learn from the rows is said here",
    "tasks/train_sft.py": "names the packages whose code makes a training's output",
    "tasks/evaluate.py": "two tasks, the base model's and the trained one's, over one computation",
    "tasks/publish.py": "the release, and whether an earlier one still stands",
    "tasks/report.py": "gathers the report's parts from five stages",
}
"""Task or flow file → why it may be longer."""


def num_lines(path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def num_statements(function: Function) -> int:
    nodes = [node for part in function.body for node in ast.walk(part) if isinstance(node, ast.stmt)]
    return len(nodes) - (ast.get_docstring(function) is not None)


def test_modules_are_short() -> None:
    long = {name(path): num_lines(path) for path in files() if num_lines(path) > MAX_MODULE_LINES}
    assert long.keys() == LONG_MODULES.keys(), long


def test_functions_are_short() -> None:
    long = {where: num_statements(node) for path in files() for where, node in functions(path) if num_statements(node) > MAX_STATEMENTS}
    assert {where.split(":")[0] + " " + where.split()[-1] for where in long} == LONG_FUNCTIONS.keys(), long


def test_a_training_loop_is_read_at_one_go() -> None:
    loops = [path for path in (ROOT / "twinkle_core" / "trainer").glob("*.py") if path.name not in ("__init__.py", "run.py")]
    assert loops
    assert [name(path) for path in loops if num_lines(path) >= MAX_LOOP_LINES] == []


def test_task_and_flow_files_hold_the_order_and_little_else() -> None:
    stages = [path for path in (ROOT / "tasks").glob("*.py") if "\nSTAGE" in path.read_text() or "@task(" in path.read_text()]
    flows = [path for path in (ROOT / "flows").glob("*.py") if "@flow(" in path.read_text()]
    assert len(stages) >= 8
    assert flows
    long = {name(path): num_lines(path) for path in stages + flows if num_lines(path) > MAX_STAGE_LINES}
    assert long.keys() == LONG_STAGES.keys(), long


@pytest.mark.parametrize(
    ("source", "expected"), [("def f():\n  'doc'\n  a = 1\n  if a:\n    b = 2\n", 3), ("def f():\n  def g():\n    x = 1\n", 2)]
)
def test_statements_are_counted_inner_ones_too(source: str, expected: int) -> None:
    function = ast.parse(source).body[0]
    assert isinstance(function, ast.FunctionDef)
    assert num_statements(function) == expected

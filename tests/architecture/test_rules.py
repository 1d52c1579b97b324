import ast
from collections.abc import Iterator

import pytest

from tests.architecture.sources import ROOT, files, functions, name, tree

BANNED_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "tools", "stuff"}
ENVIRONMENT_READERS = {"tasks/settings.py", "twinkle_core/infra/environment.py"}
BROAD_EXCEPT: dict[str, str] = {
    "twinkle_core/infra/local_group.py": "a worker's error of any kind is told to the other ranks, then raised",
    "twinkle_core/infra/notify.py": "the user's notifier failed: logged, so that the error it was to tell goes on",
    "twinkle_core/model/background_save.py": "the thread's error of any kind is kept and raised by the caller's `end_save`",
    "twinkle_core/model/parallel/agreement.py": "a rank's error of any kind is told to the other ranks, then raised on all",
    "twinkle_core/template/processes.py": "an encoding process sends its error of any kind to the process that reads the results",
}
"""File → why a broad except that does not re-raise stands there: only at the edge of a process or thread."""
OPEN_ARGUMENTS: dict[str, str] = {
    "twinkle_core/config.py recipe": "pydantic.Field",
    "twinkle_core/config.py resource": "pydantic.Field",
    "twinkle_core/types.py advance": "facts to show, under the names the caller gives them",
    "tasks/console.py advance": "implements Progress.advance",
    "tasks/track.py advance": "implements Progress.advance",
    "twinkle_core/infra/remote.py __call__": "the constructor of the user's class",
    "twinkle_core/infra/notify.py call": "the user's method",
    "twinkle_core/infra/remote_object.py call": "the user's method, in a worker",
    "twinkle_core/kernel/cpu_layers.py _lora": "the layer's own forward function, of peft",
    "twinkle_core/kernel/packed_attention.py packed_attention": "transformers calls attention functions with what it likes",
    "twinkle_core/model/transformers.py __init__": "settings of the model's transformers configuration",
    "twinkle_core/model/transformers.py forward_backward": "inputs of the loss, of a closed list of names",
    "twinkle_core/model/transformers.py forward_only": "inputs of metrics, of a closed list of names",
    "twinkle_core/model/transformers.py calculate_loss": "inputs of the loss, of a closed list of names",
    "twinkle_core/model/setup.py set_optimizer": "the optimizer's class",
    "twinkle_core/model/setup.py set_lr_scheduler": "the schedule",
    "twinkle_core/model/setup.py set_loss": "the loss",
    "twinkle_core/model/setup.py set_template": "the template",
    "twinkle_core/model/setup.py set_processor": "the processor's class",
    "twinkle_core/model/setup.py set_grad_scaler": "LossScaler",
    "twinkle_core/model/setup.py add_metric": "the metric's class",
    "twinkle_core/model/setup.py apply_patch": "the patch",
    "twinkle_core/patch/__init__.py apply_patch": "the patch",
    "twinkle_core/patch/__init__.py apply_context": "the patch",
    "twinkle_core/kernel/layers.py _keep_products": "torch's checkpoint policies are called with the operation's arguments",
    "twinkle_core/model/parallel/ring.py attention": "transformers calls attention functions with what it likes",
    "twinkle_core/model/parallel/ulysses.py attention": "transformers calls attention functions with what it likes",
    "twinkle_core/kernel/recurrent_layers.py by_document": "forward of transformers' gated delta nets",
}
"""'file name' → the named third-party call that its **kwargs go to."""


def test_no_file_is_called_after_nothing() -> None:
    assert [name(path) for path in files() if path.stem in BANNED_NAMES or path.parent.name in BANNED_NAMES] == []


def environment_reads(module: ast.Module) -> Iterator[int]:
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and node.attr in names and isinstance(node.value, ast.Name) and node.value.id == "os":
            yield node.lineno
        if isinstance(node, ast.ImportFrom) and node.module == "os" and names & {alias.name for alias in node.names}:
            yield node.lineno


def unsafe_loads(module: ast.Module) -> Iterator[int]:
    """pickle in any form, and torch's own files, which are pickles."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import) and {alias.name.split(".")[0] for alias in node.names} & {
            "pickle",
            "cloudpickle",
            "dill",
            "shelve",
            "joblib",
        }:
            yield node.lineno
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in {"pickle", "cloudpickle", "dill", "shelve", "joblib"}:
            yield node.lineno
        if (
            isinstance(node, ast.Attribute)
            and node.attr in ("load", "save")
            and isinstance(node.value, ast.Name)
            and node.value.id == "torch"
        ):
            yield node.lineno


def broad_excepts(module: ast.Module) -> Iterator[int]:
    """Handlers that catch everything and do not end by raising it again."""
    for node in ast.walk(module):
        if not isinstance(node, ast.ExceptHandler):
            continue
        kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        broad = any(kind is None or (isinstance(kind, ast.Name) and kind.id in ("Exception", "BaseException")) for kind in kinds)
        last = node.body[-1]
        if broad and not (isinstance(last, ast.Raise) and last.exc is None):
            yield node.lineno


def global_statements(module: ast.Module) -> Iterator[int]:
    return (node.lineno for node in ast.walk(module) if isinstance(node, ast.Global))


RULES = {
    "the environment is read in one place": (environment_reads, ENVIRONMENT_READERS),
    "no pickle": (unsafe_loads, {"twinkle_core/model/peer_files.py"}),
    "broad except only at listed edges": (broad_excepts, set(BROAD_EXCEPT)),
    "no global": (global_statements, set()),
}


@pytest.mark.parametrize("rule", RULES)
def test_the_code_keeps(rule: str) -> None:
    check, allowed = RULES[rule]
    found = {name(path): lines for path in files() if (lines := list(check(tree(path))))}
    assert {path: lines for path, lines in found.items() if path not in allowed} == {}
    assert allowed <= found.keys(), "an exception that is no longer needed"


def test_peers_pickles_are_read_by_the_restricted_unpickler_alone() -> None:
    module = tree(ROOT / "twinkle_core/model/peer_files.py")
    loads = [node for node in ast.walk(module) if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("load")]
    assert [ast.unparse(node.func) for node in loads] == ["torch.load"]
    assert [ast.unparse(keyword) for keyword in loads[0].keywords if keyword.arg == "weights_only"] == ["weights_only=True"]


BREACHES = [
    (environment_reads, "import os\nos.environ['A']"),
    (environment_reads, "from os import environ"),
    (environment_reads, "import os\nos.getenv('A')"),
    (unsafe_loads, "import pickle"),
    (unsafe_loads, "from cloudpickle import loads"),
    (unsafe_loads, "torch.load(path)"),
    (broad_excepts, "try: pass\nexcept: pass"),
    (broad_excepts, "try: pass\nexcept (ValueError, Exception): pass"),
    (broad_excepts, "try: pass\nexcept BaseException as e: raise ValueError from e"),
    (global_statements, "def f():\n  global a"),
]


@pytest.mark.parametrize(("check", "source"), BREACHES)
def test_a_breach_is_seen(check, source: str) -> None:
    assert len(list(check(ast.parse(source)))) == 1


def test_reraising_and_narrow_handlers_are_fine() -> None:
    source = "try: pass\nexcept BaseException:\n  close()\n  raise\ntry: pass\nexcept OSError: pass"
    assert list(broad_excepts(ast.parse(source))) == []


def test_open_arguments_only_go_to_named_calls() -> None:
    found = {f"{name(path)} {node.name}" for path in files() for _, node in functions(path) if node.args.kwarg is not None}
    assert found == OPEN_ARGUMENTS.keys()


def test_each_loss_names_its_source() -> None:
    losses = [
        (f"{name(path)} {node.name}", ast.get_docstring(node) or "")
        for path in (ROOT / "twinkle_core" / "loss").glob("*.py")
        for node in tree(path).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    ]
    assert losses
    assert [where for where, doc in losses if "https://" not in doc] == []

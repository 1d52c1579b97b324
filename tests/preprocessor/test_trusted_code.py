from __future__ import annotations

import functools
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from twinkle_core.errors import ConfigError
from twinkle_core.preprocessor import CountdownProcessor, SelfCognitionProcessor, code_imports
from twinkle_core.preprocessor.mix import mix
from twinkle_core.preprocessor.registry import FunctionProcessor, build_filter, build_preprocessor
from twinkle_core.preprocessor.trusted_code import code_digest, function_identity, load_function, names_user_code

ROW = {"query": "a", "response": "b"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rows_of_mine.py").write_text(
        "import texts_of_mine\ndef keep(row, mark='!'):\n    return texts_of_mine.louder(row, mark)\n"
    )
    (tmp_path / "texts_of_mine.py").write_text("def louder(row, mark):\n    return {**row, 'query': row['query'] + mark}\n")
    (tmp_path / "unused_of_mine.py").write_text("x = 1\n")
    return tmp_path


def test_a_function_of_the_folder_is_called_with_its_neighbours_and_arguments(folder: Path) -> None:
    processor = build_preprocessor("rows_of_mine.py:keep", {"mark": "?"}, folder)
    assert processor is not None
    assert processor(ROW) == {**ROW, "query": "a?"}
    (folder / "filters_of_mine.py").write_text("def short(trajectory):\n    return len(trajectory['messages']) < 2\n")
    assert build_filter("filters_of_mine.py:short", {}, folder)({"messages": []})


def test_no_folder_no_code(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"set TWINKLE_TRUSTED_CODE to the folder that holds rows_of_mine\.py"):
        build_preprocessor("rows_of_mine.py:keep")
    with pytest.raises(ConfigError, match="TWINKLE_TRUSTED_CODE"):
        code_digest("rows_of_mine.py:keep", None)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("../outside.py:f", "outside of the folder"),
        ("/etc/outside.py:f", "outside of the folder"),
        ("link.py:f", "outside of the folder"),
        ("nothing.py:f", "there is no file nothing.py"),
        ("rows_of_mine.py:keep()", "not of the form FILE.py:FUNCTION"),
        ("rows_of_mine.py:kept", "defines no function 'kept'; it defines keep"),
        ("rows_of_mine.py:texts_of_mine", "defines no function"),
        ("broken.py:f", "broken.py is not Python"),
    ],
)
def test_only_what_the_folder_defines_is_run(folder: Path, name: str, message: str) -> None:
    inner = folder / "inner"
    inner.mkdir()
    for path in folder.glob("*.py"):
        path.rename(inner / path.name)
    (folder / "outside.py").write_text("raise SystemExit('this was run')\n")
    (inner / "link.py").symlink_to(folder / "outside.py")
    (inner / "broken.py").write_text("def f(:\n")
    with pytest.raises(ConfigError, match=message):
        load_function(name, inner)


def test_the_digest_is_that_of_the_file_and_the_neighbours_it_imports(folder: Path) -> None:
    name = "rows_of_mine.py:keep"
    before = code_digest(name, folder)
    (folder / "unused_of_mine.py").write_text("x = 2\n")
    assert code_digest(name, folder) == before
    (folder / "texts_of_mine.py").write_text("def louder(row, mark):\n    return {**row, 'query': row['query'] * 2}\n")
    changed = code_digest(name, folder)
    (folder / "rows_of_mine.py").write_text((folder / "rows_of_mine.py").read_text() + "# more\n")
    assert len({before, changed, code_digest(name, folder)}) == 3
    (folder / "copy").mkdir()
    for path in folder.glob("*.py"):
        (folder / "copy" / path.name).write_bytes(path.read_bytes())
    assert code_digest(name, folder / "copy") == code_digest(name, folder)


def test_an_edited_file_is_run_as_it_is_even_within_the_same_second(folder: Path) -> None:
    for mark in "123":
        (folder / "texts_of_mine.py").write_text(f"def louder(row, mark):\n    return {{**row, 'query': '{mark}'}}\n")
        assert load_function("rows_of_mine.py:keep", folder)(ROW) == {**ROW, "query": mark}
    assert not list(folder.rglob("*.pyc"))


def test_a_neighbour_imported_only_when_the_function_runs_is_found_and_counted(folder: Path) -> None:
    (folder / "late_of_mine.py").write_text("def f(row):\n    from texts_of_mine import louder\n    return louder(row, '.')\n")
    before = code_digest("late_of_mine.py:f", folder)
    assert load_function("late_of_mine.py:f", folder)(ROW) == {**ROW, "query": "a."}
    (folder / "texts_of_mine.py").write_text("louder = None\n")
    assert code_digest("late_of_mine.py:f", folder) != before


def test_a_neighbour_that_is_a_link_to_elsewhere_is_refused(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("outside") / "texts.py"
    (folder / "texts_of_mine.py").rename(outside)
    (folder / "texts_of_mine.py").symlink_to(outside)
    with pytest.raises(ConfigError, match="a link to a file that lies elsewhere"):
        load_function("rows_of_mine.py:keep", folder)


def test_neighbours_of_neighbours_are_counted(folder: Path) -> None:
    (folder / "texts_of_mine.py").write_text("from deeper_of_mine import louder\n")
    (folder / "deeper_of_mine.py").write_text("def louder(row, mark):\n    return row\n")
    before = code_digest("rows_of_mine.py:keep", folder)
    assert load_function("rows_of_mine.py:keep", folder)(ROW) == ROW
    (folder / "deeper_of_mine.py").write_text("louder = dict\n")
    assert code_digest("rows_of_mine.py:keep", folder) != before


def test_a_neighbour_with_another_modules_name_or_a_package_is_refused(folder: Path) -> None:
    (folder / "json.py").write_text("dumps = None\n")
    (folder / "user.py").write_text("import json\ndef f(row): return row\n")
    with pytest.raises(ConfigError, match=r"json\.py .* has the name of another module"):
        load_function("user.py:f", folder)
    (folder / "pack_of_mine").mkdir()
    (folder / "pack_of_mine" / "__init__.py").touch()
    (folder / "user.py").write_text("import pack_of_mine\ndef f(row): return row\n")
    with pytest.raises(ConfigError, match="package 'pack_of_mine'"):
        code_digest("user.py:f", folder)


def test_a_module_that_is_found_by_chance_is_refused(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its code would be no part of the key, and whether it is found depends on the current folder."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "leaky_of_mine.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(elsewhere))
    (folder / "texts_of_mine.py").write_text("import leaky_of_mine\ndef louder(row, mark):\n    return row\n")
    for ask in (code_digest, load_function):
        with pytest.raises(ConfigError, match=r"rows_of_mine\.py imports leaky_of_mine, which is neither beside it nor an installed"):
            ask("rows_of_mine.py:keep", folder)
    (folder / "texts_of_mine.py").write_text("from .deeper import x\n")
    with pytest.raises(
        ConfigError, match=r"texts_of_mine\.py is no part of a package: write 'from NAME import …' without a dot, not 'from \.deeper'"
    ):
        load_function("rows_of_mine.py:keep", folder)


def test_the_versions_of_imported_packages_are_part_of_the_digest(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "texts_of_mine.py").write_text("import json, twinkle_core.types\ndef louder(row, mark):\n    return row\n")
    without = code_digest("rows_of_mine.py:keep", folder)
    monkeypatch.setattr(code_imports, "version", lambda name: "9")
    assert code_digest("rows_of_mine.py:keep", folder) == without
    (folder / "texts_of_mine.py").write_text("import yaml\ndef louder(row, mark):\n    return row\n")
    newer = code_digest("rows_of_mine.py:keep", folder)
    monkeypatch.undo()
    assert len({without, newer, code_digest("rows_of_mine.py:keep", folder)}) == 3
    assert code_imports.installed_versions(folder / "rows_of_mine.py", {"yaml", "sys"}) == [
        ("PyYAML", importlib.metadata.version("PyYAML"))
    ]


def test_a_decorated_function_is_one_that_the_file_defines(folder: Path) -> None:
    (folder / "texts_of_mine.py").write_text(
        "def plain(f):\n    def inner(row):\n        return {**f(row), 'query': 'inner'}\n    return inner\n"
    )
    (folder / "rows_of_mine.py").write_text("from texts_of_mine import plain\n@plain\ndef keep(row):\n    return row\n")
    assert load_function("rows_of_mine.py:keep", folder)(ROW) == {**ROW, "query": "inner"}
    before = code_digest("rows_of_mine.py:keep", folder)
    (folder / "texts_of_mine.py").write_text("def plain(f):\n    return f\n")
    assert code_digest("rows_of_mine.py:keep", folder) != before
    with pytest.raises(ConfigError, match="defines no function 'plain'"):
        load_function("rows_of_mine.py:plain", folder)


def at_the_top(row: object) -> object:
    return row


class Keeper:
    def __init__(self, limit: object) -> None:
        self.limit = limit

    def __call__(self, trajectory: object) -> bool:
        return True


def test_what_has_a_stable_form_is_known_by_it() -> None:
    assert function_identity(at_the_top) == function_identity(at_the_top) != function_identity(mix)
    assert function_identity(Keeper(1)) == function_identity(Keeper(1)) != function_identity(Keeper(2))
    assert function_identity(CountdownProcessor) != function_identity(CountdownProcessor())
    assert function_identity(SelfCognitionProcessor("B", "H")) != function_identity(SelfCognitionProcessor("C", "H"))


def test_what_has_none_is_refused() -> None:
    def inner(row: object) -> object:
        return row

    for given in (
        lambda row: row,
        inner,
        functools.partial(at_the_top),
        str.strip,
        len,
        Keeper(object()),
        FunctionProcessor(at_the_top, {}),
    ):
        with pytest.raises(ConfigError, match="stable form|lies inside a function|no source"):
            function_identity(given)


def test_a_function_typed_at_a_prompt_is_refused_and_one_of_a_script_is_not(tmp_path: Path) -> None:
    code = (
        "from twinkle_core.preprocessor.trusted_code import function_identity\n"
        "def f(row): return row\n"
        "try:\n  print('known', function_identity(f))\nexcept ValueError as error:\n  print('refused', error)\n"
    )
    (tmp_path / "script.py").write_text(code)
    root = Path(__file__).parents[2]
    for arguments, word in ((["-c", code], "refused"), ([str(tmp_path / "script.py")], "known")):
        told = subprocess.run(
            [sys.executable, *arguments], cwd=root, env={"PYTHONPATH": str(root)}, capture_output=True, text=True, check=True
        )
        assert told.stdout.startswith(word), told.stdout


def test_names_of_code_are_told_from_names_of_classes() -> None:
    assert [names_user_code(name) for name in ("a.py:f", "GSM8KProcessor", "dir/a.py:f")] == [True, False, True]

import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from tests.architecture.sources import ROOT
from twinkle_cli.main import cli

FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```\s*$", re.MULTILINE | re.DOTALL)
DOCUMENTS = [path for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))) if path.exists()]


def blocks(text: str) -> list[tuple[str, set[str], str]]:
    """(language, further words, body) of each fenced block."""
    found = []
    for match in FENCE.finditer(text):
        language, *words = match["info"].split() or [""]
        found.append((language, set(words), match["body"]))
    return found


TESTED = [
    pytest.param(language, body, id=f"{path.name}-{i}", marks=[pytest.mark.slow] if "slow" in words else [])
    for path in DOCUMENTS
    for i, (language, words, body) in enumerate(blocks(path.read_text(encoding="utf-8")))
    if "test" in words and language in ("bash", "python")
]


@pytest.mark.parametrize(("language", "body"), TESTED)
def test_a_block_of_the_documents_runs(language: str, body: str, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    work = tmp_path / "work"
    tools.mkdir()
    work.mkdir()
    twinkle = tools / "twinkle"
    twinkle.write_text(f"#!{sys.executable}\nfrom twinkle_cli.main import main\nmain()\n")
    twinkle.chmod(0o755)
    path = os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]])
    command = ["bash", "-euo", "pipefail", "-c", body] if language == "bash" else [sys.executable, "-c", body]
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "TWINKLE_HOME": str(tmp_path / "home")}
    run = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 0, f"{body}\n{run.stdout}\n{run.stderr}"


def test_the_readme_has_blocks_that_are_run() -> None:
    readme = blocks((ROOT / "README.md").read_text(encoding="utf-8"))
    assert [words for _, words, _ in readme if "test" in words]


def test_commands_in_the_documents_exist() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test", "test-fast", "test-chaos", "check", "bench", "up", "down", "clean"} <= targets
    shell = "\n".join(body for path in DOCUMENTS for language, _, body in blocks(path.read_text(encoding="utf-8")) if language == "bash")
    made = set(re.findall(r"^\s*make ((?:[a-z-]+ ?)+)", shell, re.MULTILINE))
    assert made, "no document shows a make target"
    assert {target for line in made for target in line.split()} <= targets
    for group, name in re.findall(r"^\s*(?:\.venv/bin/)?twinkle (?:(artifacts) )?([a-z]+)", shell, re.MULTILINE):
        commands = cli.commands["artifacts"] if group else cli
        assert isinstance(commands, click.Group)
        assert name in commands.commands, f"no command 'twinkle {group} {name}'"


def test_blocks_are_found_with_their_words() -> None:
    text = "a\n```bash test slow\necho 1\n```\n```python\nx\n```\n```\nplain\n```\n"
    assert blocks(text) == [("bash", {"test", "slow"}, "echo 1\n"), ("python", set(), "x\n"), ("", set(), "plain\n")]

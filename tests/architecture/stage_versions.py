"""Which code stands behind each stage's VERSION: reads and writes stage_versions.json.

python -m tests.architecture.stage_versions                          after a version was raised, or a stage added
python -m tests.architecture.stage_versions --same-output 'reason'   after a change that leaves the output as it was
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_name("stage_versions.json")


@dataclass(frozen=True, kw_only=True)
class Found:
    """A stage as the code declares it now."""

    version: int
    sha256: str
    """Of the sources of its modules."""


def declared(root: Path = ROOT) -> dict[str, Found]:
    """The stages declared in tasks/*.py by `Stage(name=…, version=…, modules=(…))`, read without importing them."""
    stages: dict[str, Found] = {}
    for path in sorted((root / "tasks").glob("*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(module):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Stage":
                values = {keyword.arg: _value(root, module, keyword.value) for keyword in node.keywords}
                if values["name"] in stages:
                    raise ValueError(f"stage '{values['name']}' is declared twice, again in {path.name}")
                stages[values["name"]] = Found(version=values["version"], sha256=digest(root, values["modules"]))
    return stages


def _value(root: Path, module: ast.Module, node: ast.expr) -> Any:
    """A literal, or a constant that stands at the top of this module or of the one it is imported from (VERSION beside its code)."""
    if not isinstance(node, ast.Name):
        return ast.literal_eval(node)
    for statement in module.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == node.id for target in targets):
            return _value(root, module, statement.value)  # type: ignore[attr-defined]
        if isinstance(statement, ast.ImportFrom) and node.id in [alias.asname or alias.name for alias in statement.names]:
            source = (root / Path(*str(statement.module).split("."))).with_suffix(".py")
            return _value(root, ast.parse(source.read_text(encoding="utf-8")), node)
    raise ValueError(f"a Stage is declared with {node.id}, which is no constant of the module nor imported from one")


def digest(root: Path, modules: tuple[str, ...]) -> str:
    """sha256 over names and bytes of the modules' files; a package stands for all modules in it."""
    total = hashlib.sha256()
    for module in sorted(modules):
        base = root / Path(*module.split("."))
        paths = sorted(base.rglob("*.py")) if base.is_dir() else [base.with_suffix(".py")]
        for path in paths:
            if not path.exists():
                raise FileNotFoundError(f"a stage names the module {module}, and there is no {path}")
            total.update(path.relative_to(root).as_posix().encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def problems(found: dict[str, Found], recorded: dict[str, Any]) -> list[str]:
    """What is to be done about each stage; [] when code and record agree."""
    told = [f"stage '{name}' is recorded but no longer declared; run `make stage-versions`" for name in recorded if name not in found]
    for name, now in found.items():
        known = recorded.get(name)
        if known is None:
            told.append(f"stage '{name}' is new; run `make stage-versions`")
        elif now.version < known["version"]:
            told.append(f"stage '{name}' went back from version {known['version']} to {now.version}; old artifacts would be believed again")
        elif now.version > known["version"]:
            told.append(f"stage '{name}' has a new version {now.version}; run `make stage-versions`")
        elif now.sha256 != known["sha256"]:
            told.append(
                f"stage '{name}' has changed code under version {now.version}: raise the version in its task file and run "
                "`make stage-versions`, or, if the output is the same to the byte, `make stage-versions SAME_OUTPUT='the reason'`"
            )
    return told


def updated(found: dict[str, Found], recorded: dict[str, Any], same_output: str | None) -> dict[str, Any]:
    """The record for the code as it is now. Raises `ValueError` for a change that neither a version nor a reason covers."""
    result: dict[str, Any] = {}
    for name, now in sorted(found.items()):
        known = recorded.get(name, {"version": 0, "sha256": "", "same_output": []})
        reasons = known["same_output"] if now.version == known["version"] else []
        if now.version < known["version"] or (now.version == known["version"] and now.sha256 != known["sha256"]):
            if not same_output or now.version < known["version"]:
                raise ValueError("\n".join(problems({name: now}, {name: known})))
            reasons = [*reasons, same_output]
        result[name] = {"version": now.version, "sha256": now.sha256, "same_output": reasons}
    return result


def main() -> int:
    """Rewrites the file; 1 when a change is neither versioned nor explained."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--same-output", metavar="REASON", help="why the changed code gives the same bytes as before")
    reason = parser.parse_args().same_output
    recorded = json.loads(FILE.read_text()) if FILE.exists() else {}
    try:
        FILE.write_text(json.dumps(updated(declared(), recorded, reason), indent=1) + "\n")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The project's own Python files, for the tests of this folder."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("storage", "twinkle_core", "tasks", "flows", "twinkle_cli")


def files() -> list[Path]:
    """Every module of the five packages."""
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def name(path: Path) -> str:
    """`storage/uri.py` for that file."""
    return path.relative_to(ROOT).as_posix()


def module(path: Path) -> str:
    """`storage.uri` for storage/uri.py."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def tree(path: Path) -> ast.Module:
    """The file's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"))


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(path: Path) -> Iterator[tuple[str, Function]]:
    """(`path:line name`, node) of every function, methods and inner ones included."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{name(path)}:{node.lineno} {node.name}", node

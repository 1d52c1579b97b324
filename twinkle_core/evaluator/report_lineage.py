"""What a release was made of, as a chain of cards from the release back to the sources."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from twinkle_core.evaluator.report_html import tag, text


class LineageNode(TypedDict):
    """One artifact, source or release.

    Example: `{'stage': 'encode', 'key': '3f…', 'digest': '9a…', 'version': 1, 'inputs': ['c0…', 'base model']}`.
    """

    stage: str
    """Stage name; 'source' for what came from outside, 'release' for what goes out."""
    key: str
    """Artifact key, or the name of a source or release: what `inputs` of other nodes refer to."""
    digest: str
    """sha256 hex of the content."""
    version: int | str | None
    """VERSION of the stage; None for a source."""
    inputs: list[str]
    """Keys of the nodes that it was made of."""


def lineage_chain(nodes: Sequence[LineageNode]) -> str:
    """Cards in levels: a node stands below everything that was made of it. An input that is no node is shown by its key alone."""
    if not nodes:
        return '<p class="empty">No lineage recorded.</p>'
    by_key = {node["key"]: node for node in nodes}
    depth = _depths(nodes, by_key)
    levels = [[node for node in nodes if depth[node["key"]] == level] for level in range(max(depth.values()) + 1)]
    rows = [tag("div", "".join(_card(node, by_key) for node in level), "level") for level in levels if level]
    return tag("div", tag("div", "↑", "arrow").join(rows), "chain")


def _depths(nodes: Sequence[LineageNode], by_key: dict[str, LineageNode]) -> dict[str, int]:
    """Longest way down from a node that nothing was made of. Rounds are bounded, so a cycle cannot hang the page."""
    depth = dict.fromkeys(by_key, 0)
    for _ in nodes:
        for node in nodes:
            for key in node["inputs"]:
                if key in depth:
                    depth[key] = min(max(depth[key], depth[node["key"]] + 1), len(nodes) - 1)
    return depth


def _card(node: LineageNode, by_key: dict[str, LineageNode]) -> str:
    version = tag("span", f"v{text(node['version'])}", "badge") if node["version"] is not None else ""
    is_plain = node["stage"] in ("source", "release")
    title = f"{text(node['stage'])} {text(node['key'])}" if is_plain else text(node["stage"])
    lines = "content " + _short(node["digest"])
    if not is_plain:
        lines += " · key " + _short(node["key"])
    if node["inputs"]:
        lines += "<br>from " + ", ".join(_input_name(key, by_key) for key in node["inputs"])
    classes = "card node source" if node["stage"] == "source" else "card node"
    return tag("div", tag("span", title, "stage") + " " + version + tag("div", lines, "lines"), classes)


def _input_name(key: str, by_key: dict[str, LineageNode]) -> str:
    node = by_key.get(key)
    if node is None:
        return _short(key)
    return text(node["key"] if node["stage"] == "source" else node["stage"])


def _short(digest: str) -> str:
    return f'<span class="mono" title="{text(digest)}">{text(digest[:12])}</span>'

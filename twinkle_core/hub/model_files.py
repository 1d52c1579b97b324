"""Which files of a model folder count, and what for. Code, pickles and anything not named here are never read."""

from __future__ import annotations

import json
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from twinkle_core.errors import ConfigError

WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
CONFIG_FILES = ("config.json", "generation_config.json")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",  # SentencePiece: tokenizer.model, spiece.model, sentencepiece.bpe.model
    "*.tiktoken",
    "chat_template*",
    "preprocessor_config.json",  # how images become pixels, of models that take them
)
CHAT_TEMPLATES = "additional_chat_templates/*.jinja"
"""Further chat templates by name (tool_use, say), which transformers reads beside `chat_template.jinja`."""
TEXTS_ABOUT_TOOLS = "encoding/encoding_dsv4.py"
"""Read as text by `DeepseekV4Template`, never run, and not fetched."""
LEFT_OUT = ("consolidated*", "adapter_model.safetensors")
"""Weights in another layout, beside those that transformers loads."""


def is_allowed(name: str) -> bool:
    """May this file of a model repository be fetched? Only files that a model folder is made of: at the top, and further chat templates."""
    return is_model_file(name) or (is_tokenizer_file(name) and name != TEXTS_ABOUT_TOOLS)


def is_model_file(name: str) -> bool:
    return "/" not in name and _matches(name, (*WEIGHT_FILES, *CONFIG_FILES)) and not _matches(name, LEFT_OUT)


def is_tokenizer_file(name: str) -> bool:
    """Tokenizer files, chat templates, and the generation settings, which name the ids that end a turn."""
    if "/" in name:
        return name.count("/") == 1 and _matches(name, (CHAT_TEMPLATES, TEXTS_ABOUT_TOOLS))
    return _matches(name, (*TOKENIZER_FILES, "generation_config.json"))


def files_of(folder: Path) -> list[str]:
    """Sorted names of the files in a model folder and in the folders right in it, '/' between the parts."""
    return sorted(path.relative_to(folder).as_posix() for pattern in ("*", "*/*") for path in folder.glob(pattern) if path.is_file())


def check_names(names: Iterable[str], what: str) -> None:
    """Raises `ConfigError` unless the files make a model that loads by itself; says what there is instead."""
    present = set(names)
    if "config.json" not in present:
        hint = "it holds an adapter alone; export with form 'merged'" if "adapter_config.json" in present else "it is no model folder"
        raise ConfigError(f"{what} has no config.json: {hint}")
    if not any(_matches(name, ("*.safetensors",)) and is_model_file(name) for name in present):
        others = sorted(name for name in present if _matches(name, ("*.bin", "*.pt", "*.pth", "*.gguf")))
        found = f"only {', '.join(others)}" if others else "no weights at all"
        raise ConfigError(f"{what} has no .safetensors weights, {found}: name a .gguf file itself, or convert the weights to safetensors")
    if not any(_matches(name, TOKENIZER_FILES) for name in present):
        raise ConfigError(f"{what} has no tokenizer files: put tokenizer.json and tokenizer_config.json beside the weights")


def check_folder(folder: Path) -> None:
    """`check_names` of a folder, and that each shard that the weight index names is there."""
    if not folder.is_dir():
        raise ConfigError(f"model folder {folder} does not exist")
    check_names((path.name for path in folder.iterdir()), f"model folder {folder.name}")
    for index in sorted(folder.glob("*.safetensors.index.json")):
        named = set(json.loads(index.read_text())["weight_map"].values())
        if missing := sorted(name for name in named if not (folder / name).is_file()):
            raise ConfigError(f"model folder {folder.name} lacks {', '.join(missing)}, which {index.name} names: copy the whole model")


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)

"""The files of an exported model beside its weights: tokenizer, chat template, generation settings. Imports transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from twinkle_core.errors import ConfigError, DataError
from twinkle_core.model.checkpoint_files import read_json, write_json

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "tekken.json",
    "chat_template.json",
    "chat_template.jinja",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
GENERATION_FILE = "generation_config.json"
PATH_KEYS = ("_name_or_path", "name_or_path", "base_model_name_or_path", "tokenizer_file", "vocab_file")
CODE_KEY = "auto_map"
"""Names classes in Python files of the folder, which are not published with it."""
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Settings that mean nothing unless `do_sample` is true; transformers refuses to save them without."""


def generation_settings(base_folder: Path) -> dict[str, Any] | None:
    """The base model's generation settings without sampling flags that its own `do_sample` turns off; None where it has no file.

    Raises `ConfigError` where transformers would not save the rest either.
    """
    path = base_folder / GENERATION_FILE
    if not path.is_file():
        return None
    settings = read_json(path)
    if settings.get("do_sample") is not True:
        settings = {name: value for name, value in settings.items() if name not in SAMPLING}
    try:
        GenerationConfig.from_dict(settings).validate(strict=True)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path} holds settings that transformers refuses ({error}); mend it in the base model") from error
    return settings


def copy_tokenizer(base_folder: Path, out: Path) -> None:
    """Tokenizer and chat templates, byte for byte but for keys that hold a path or name code."""
    for name in TOKENIZER_FILES:
        if (base_folder / name).is_file():
            shutil.copyfile(base_folder / name, out / name)
    templates = base_folder / "additional_chat_templates"
    if templates.is_dir():
        shutil.copytree(templates, out / templates.name)
    for path in out.glob("*config.json"):
        settings = json.loads(path.read_text())
        wrong = [key for key in PATH_KEYS if isinstance(settings.get(key), str) and Path(settings[key]).is_absolute()]
        wrong += [CODE_KEY] if CODE_KEY in settings else []
        if wrong:
            write_json(path, {key: value for key, value in settings.items() if key not in wrong})


def refuse_local_paths(out: Path, folders: tuple[Path, ...]) -> None:
    """Raises `DataError` when a text file of `out` names one of `folders`."""
    known = {str(form) for folder in folders for form in (folder.absolute(), folder.resolve())}
    for path in sorted(out.rglob("*")):
        if path.suffix in (".json", ".jinja", ".txt", ".md") and path.is_file():
            text = path.read_text()
            found = [folder for folder in known if len(folder) > 1 and folder in text]
            if found:
                raise DataError(f"{path.name} holds the local path {found[0]}, which must not be published; remove it there")

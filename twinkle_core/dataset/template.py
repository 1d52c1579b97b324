"""From what `set_template` is given to a template."""

from __future__ import annotations

import os
import shutil
import struct
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle_core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from twinkle_core.template import Template


def build_template(template: Any, model_id: str | Path | None, settings: Mapping[str, Any], cache_dir: Path | None) -> Template:
    """The template: an instance as it is, or a class or name built with `settings` for the tokenizer of `model_id`."""
    from twinkle_core.template import Template, template_class

    if isinstance(template, Template):
        if settings or model_id is not None:
            raise ConfigError("the template is built already: model_id and settings are for a name or class")
        return template
    kind = template_class(template)
    if model_id is None:
        raise ConfigError("set_template needs model_id: whose tokenizer and chat template are to be used")
    return kind(tokenizer_folder(model_id, cache_dir or Path.home() / ".cache" / "twinkle"), **settings)


def tokenizer_folder(model_id: str | Path, cache: Path) -> Path:
    """A local folder with the model's tokenizer. A folder that is there is taken as it is; others are found as `resolve_model` does.

    The tokenizer of a .gguf file is written into `cache` once; the weights are not converted for it.
    """
    from twinkle_core.hub.resolve import resolve_model

    if Path(model_id).is_dir():
        return Path(model_id)
    source = resolve_model(str(model_id), cache)
    if source.path.is_dir():
        return source.path
    folder = cache / "tokenizers" / source.tokenizer_digest
    if not folder.is_dir():
        temporary = folder.with_name(f".{uuid.uuid4().hex}")
        try:
            _write_tokenizer(source.path, temporary)
            os.rename(temporary, folder)
        except OSError:
            if not folder.is_dir():  # another process was not faster, so it is a real failure
                raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _write_tokenizer(gguf: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    except (ValueError, LookupError, NotImplementedError, struct.error) as error:
        raise DataError(f"transformers cannot read the tokenizer of {gguf.name}: {error}") from error
    tokenizer.save_pretrained(folder)

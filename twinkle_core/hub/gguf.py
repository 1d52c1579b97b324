"""A .gguf file as a Hugging Face folder: dequantized once to float32, with its tokenizer and chat template."""

from __future__ import annotations

import json
import os
import shutil
import struct
import uuid
from pathlib import Path

from storage.fingerprint import digest_file, fingerprint
from twinkle_core.errors import DataError
from twinkle_core.hub.file_digests import FileDigests

CONVERSION = 1
"""Raised when the conversion gives other files: it is part of the model's digest."""
LISTING = "conversion.json"


def gguf_digest(file_sha256: str) -> str:
    """Digest of the folder that the file becomes, known before it is converted."""
    return fingerprint({"gguf": file_sha256, "conversion": CONVERSION})


def convert(gguf: Path, digest: str, cache: Path) -> Path:
    """The folder `cache`/models/`digest`, made when it is not there or no longer what was written. Takes seconds, and torch.

    Raises `DataError` when transformers cannot read the file.
    """
    folder = cache / "models" / digest
    if _is_sound(folder, FileDigests(cache)):
        return folder
    temporary = folder.with_name(f".{digest[:16]}-{uuid.uuid4().hex}")
    temporary.mkdir(parents=True)
    try:
        _write(gguf, temporary)
        files = {path.name: digest_file(path) for path in sorted(temporary.iterdir())}
        (temporary / LISTING).write_text(json.dumps(files, indent=1))
        if folder.exists() and not _is_sound(folder, FileDigests(cache)):
            os.rename(folder, temporary.with_name(temporary.name + ".damaged"))
        try:
            os.rename(temporary, folder)
        except OSError:  # another process was faster; a sound folder of the same digest is the same model
            if not _is_sound(folder, FileDigests(cache)):
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(temporary.with_name(temporary.name + ".damaged"), ignore_errors=True)
    return folder


def _write(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32, local_files_only=True)
    except (ValueError, OSError, LookupError, NotImplementedError, struct.error) as error:
        raise DataError(f"transformers cannot read {gguf.name}: {error}. Is it whole, and of an architecture that it knows?") from error
    # The weights are plain float32 now, but the loader still calls the model quantized and would refuse to save it.
    setattr(model, "hf_quantizer", None)  # noqa: B010  # mypy takes any attribute of a module for a tensor
    del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _is_sound(folder: Path, digests: FileDigests) -> bool:
    try:
        files = json.loads((folder / LISTING).read_text())
        return all(digests.digest(folder / name) == sha256 for name, sha256 in files.items())
    except (OSError, ValueError):
        return False

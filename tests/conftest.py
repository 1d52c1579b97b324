"""What every test gets: no network but loopback, its own folders, no telemetry; one Prefect server and one tiny model a session."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.settings import QUIET, Settings

TINY_TEXT = [
    "You are a helpful assistant.",
    "Who are you? What is your name? Who created you?",
    "I am Stella, an assistant made by the Twinkle team.",
    "What is 12 + 7 - 3? The answer is 16. 0 1 2 3 4 5 6 7 8 9",
]
TINY_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class NetworkRefused(AssertionError):
    """A test reached for an address outside this machine."""


@pytest.fixture(scope="session", autouse=True)
def _environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The process's environment for the whole session; what a developer has set for their own runs is not seen by tests."""
    home = tmp_path_factory.mktemp("twinkle-home")
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("TWINKLE_", "PREFECT_", "MLFLOW_", "AWS_", "RAY_", "HF_")):
                patch.delenv(name)
        for name, value in QUIET.items():
            patch.setenv(name, value)
        patch.setenv("TWINKLE_HOME", str(home))
        patch.setenv("PREFECT_HOME", str(home / "prefect"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        yield home


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store and services of its own for each test."""
    monkeypatch.setenv("TWINKLE_HOME", str(tmp_path / "twinkle-home"))


@pytest.fixture(scope="session", autouse=True)
def _loopback_only() -> Iterator[None]:
    """Refuses every connection of this process that would leave the machine, names included: they would be looked up outside."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "connect_ex"):
            patch.setattr(socket.socket, name, _guarded(getattr(socket.socket, name)))
        patch.setattr(socket, "getaddrinfo", _guarded_lookup(socket.getaddrinfo))
        yield


def _guarded(connect: Any) -> Any:
    def guarded(self: socket.socket, address: Any) -> Any:
        if self.family in (socket.AF_INET, socket.AF_INET6) and self.type & socket.SOCK_STREAM:
            _refuse_unless_local(address[0])
        return connect(self, address)

    return guarded


def _guarded_lookup(lookup: Any) -> Any:
    def guarded(host: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_unless_local(host)
        return lookup(host, *args, **kwargs)

    return guarded


def _refuse_unless_local(host: Any) -> None:
    name = host.decode() if isinstance(host, bytes) else host
    if name in (None, "", "localhost", "0.0.0.0", "::", socket.gethostname()):
        return
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        raise NetworkRefused(f"a test looks up '{name}'; only loopback is allowed") from None
    if not (address.is_loopback or name in _own_addresses()):
        raise NetworkRefused(f"a test connects to {name}; only loopback is allowed")


def _own_addresses() -> set[str]:
    """This machine's own addresses: Ray's processes talk over them."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            _SOCKET_CONNECT(probe, ("198.51.100.1", 9))  # a datagram socket sends nothing on connect; the address is for documentation
        except OSError:
            return set()
        return {probe.getsockname()[0]}


_SOCKET_CONNECT = socket.socket.connect


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """API address of one real Prefect server for the session, in the environment too. Stopped by its process at the end."""
    from twinkle_cli import services

    home = tmp_path_factory.mktemp("prefect-server")
    settings = services.up(Settings.from_env({"TWINKLE_HOME": str(home)}), ("prefect",), timeout_seconds=120)
    assert settings.prefect_api_url is not None
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PREFECT_API_URL", settings.prefect_api_url)
            yield from _with_prefect_settings(settings.prefect_api_url)
    finally:
        services.down(settings)


def _with_prefect_settings(api_url: str) -> Iterator[str]:
    """Prefect may have read its settings before the server was there."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: api_url}):
        yield api_url
        # As prefect_test_harness does: what is still to be sent would complain about the gone server after pytest's last line.
        APILogWorker.instance().drain()
        EventsWorker.drain_all()


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random Llama (2 layers, hidden size 64) with a byte-level BPE tokenizer and a ChatML template. Same bytes each time."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    vocab_size = _save_tiny_tokenizer(folder)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def _save_tiny_tokenizer(folder: Path) -> int:
    """Trains and saves the tokenizer; its number of tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder.mkdir(parents=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=384, special_tokens=special, initial_alphabet=sorted(alphabet), show_progress=False)
    tokenizer.train_from_iterator(TINY_TEXT * 4, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512, "chat_template": TINY_TEMPLATE, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    return int(tokenizer.get_vocab_size())


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real data sets, which lie beside the checkout on some machines."""
    folder = Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the shared data is not here")
    return folder

import socket
import urllib.error
import urllib.request

import pytest

from tasks.settings import Settings


def test_a_connection_that_leaves_the_machine_is_refused() -> None:
    with socket.socket() as client, pytest.raises(AssertionError, match="only loopback"):
        client.connect(("198.51.100.1", 80))
    with pytest.raises((AssertionError, urllib.error.URLError), match="only loopback"):
        urllib.request.urlopen("http://example.org/", timeout=5)


def test_loopback_is_allowed() -> None:
    with socket.socket() as server, socket.socket() as client:
        server.bind(("127.0.0.1", 0))
        server.listen()
        client.connect(("localhost", server.getsockname()[1]))


def test_each_test_has_a_home_of_its_own(tmp_path) -> None:
    assert Settings.from_env().home == tmp_path / "twinkle-home"


@pytest.mark.slow
def test_the_tiny_model_loads_encodes_a_conversation_and_predicts(tiny_llama) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    messages = [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "I am Stella."}]
    ids = tokenizer.apply_chat_template(messages, return_dict=False)
    assert tokenizer.decode(ids) == "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\nI am Stella.<|im_end|>\n"
    assert ids.count(tokenizer.eos_token_id) == 2
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    assert model.config.num_hidden_layers == 2
    logits = model(input_ids=torch.tensor([ids])).logits
    assert logits.shape == (1, len(ids), len(tokenizer))
    assert torch.isfinite(logits).all()

"""Which tokens a stretch of text gave: those whose offsets, as the tokenizer itself traces them, overlap it. On real tokenizers, and on
small ones trained here for what in a tokenizer moves, adds or loses characters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from tests.tokenizers import NAMES, tokenizer_files
from twinkle_core.errors import ConfigError
from twinkle_core.template import Template
from twinkle_core.template.tokenized import TextTokenizer

_WORDS = ["user one two abc word ok don't 日本 é e\u0301 ab ing", "👩‍👩‍👧 012 123 word word one one"] * 3
_SPECIALS = ["<unk>", "<|im_start|>", "<|im_end|>"]
_ADDED = [AddedToken("<x>", lstrip=True), AddedToken("<y>", rstrip=True, normalized=False), AddedToken("<z>", single_word=True)]
PIECES = [
    "🙂", "👩‍👩‍👧", "e\u0301", "é", "\u0301", "가", "\u1100\u1161", "\u212b", "\u0958", "ﬁ", "İ", "日本", "鬼",
    "one two", "word", "don't", "ing", "0123", "x", " ", "  ", "\n\n", "\t", "\r\n", "\xa0", "\u3000", "\u2028",
    "\ufeff", "\x00", "\x1f", "\x7f", "\u200d", "\ufffd", "Ġ", "▁", "##ing", "<unk>", "</s>", "<0x41>",
    "<x>", "<y>", "<z>", "<|im_start|>", "<|im_end|>", "<think>",
]  # fmt: skip
TEXTS = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=4)), max_size=8).map("".join)


def bytes_bpe(pre: Any = None, norm: Any = None, added: Sequence[AddedToken] = _ADDED, **options: Any) -> Tokenizer:
    """A BPE whose vocabulary has every byte."""
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=_SPECIALS[1:], initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    return trained(models.BPE(**options), trainer, pre or pre_tokenizers.ByteLevel(add_prefix_space=False), norm, added)


def trained(model: Any, trainer: Any, pre: Any = None, norm: Any = None, added: Sequence[AddedToken] = _ADDED) -> Tokenizer:
    tokenizer = Tokenizer(model)
    if pre is not None:
        tokenizer.pre_tokenizer = pre
    if norm is not None:
        tokenizer.normalizer = norm
    tokenizer.train_from_iterator(_WORDS, trainer)
    tokenizer.add_tokens(list(added))
    return tokenizer


def _then_bytes(*steps: Any) -> Any:
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False)])


def _sentencepiece(**options: Any) -> Tokenizer:
    specials = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=specials, show_progress=False)
    norm = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return trained(models.BPE(byte_fallback=True, unk_token="<unk>", **options), trainer, norm=norm)


def _wordpiece() -> Tokenizer:
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=_SPECIALS, show_progress=False)
    return trained(models.WordPiece(unk_token="<unk>"), trainer, pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer())


def _unigram() -> Tokenizer:
    trainer = trainers.UnigramTrainer(vocab_size=80, special_tokens=_SPECIALS, unk_token="<unk>", show_progress=False)
    return trained(models.Unigram(), trainer, pre_tokenizers.Metaspace(), normalizers.NFKC())


def _continued() -> Tokenizer:
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=_SPECIALS, continuing_subword_prefix="##", show_progress=False)
    return trained(models.BPE(continuing_subword_prefix="##", unk_token="<unk>"), trainer, pre_tokenizers.Whitespace())


def _lacking_bytes(**options: Any) -> Tokenizer:
    """Without a token for the byte of 'x'; with `byte_fallback`, one that is written <0x78>."""
    names = [name for name in sorted(pre_tokenizers.ByteLevel.alphabet()) if name != "x"] + [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[], **options))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_tokens(_ADDED)
    return tokenizer


_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
MADE: dict[str, Callable[[], Tokenizer]] = {
    "bytes": bytes_bpe,
    "NFC": lambda: bytes_bpe(norm=normalizers.NFC()),
    "NFC, an added token that it changes": lambda: bytes_bpe(
        norm=normalizers.NFC(), added=[AddedToken("e\u0301", normalized=True, lstrip=True), *_ADDED]
    ),
    "added tokens that are in the vocabulary as bytes": lambda: bytes_bpe(added=[AddedToken("é"), AddedToken("Ġw"), *_ADDED]),
    "bytes twice": lambda: bytes_bpe(_then_bytes(_BYTES)),
    "bytes lacking": _lacking_bytes,
    "bytes lacking, fallback": lambda: _lacking_bytes(byte_fallback=True),
    "prefix space": lambda: bytes_bpe(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "split, isolated": lambda: bytes_bpe(_then_bytes(pre_tokenizers.Split(Regex(r"\s+|o"), "isolated"))),
    "split, removed": lambda: bytes_bpe(_then_bytes(pre_tokenizers.Split(Regex(r"\s+|o"), "removed"))),
    "digits": lambda: bytes_bpe(_then_bytes(pre_tokenizers.Digits(individual_digits=True))),
    "ignore_merges": lambda: bytes_bpe(ignore_merges=True),
    "NFKC": lambda: bytes_bpe(norm=normalizers.NFKC()),
    "Strip": lambda: bytes_bpe(norm=normalizers.Strip()),
    "sentencepiece": _sentencepiece,
    "wordpiece": _wordpiece,
    "unigram": _unigram,
    "continuing_subword_prefix": _continued,
}
BY_LENGTHS = {"bytes", "NFC", "NFC, an added token that it changes", "bytes lacking", "split, isolated", "digits", "ignore_merges"}


@cache
def made(name: str) -> tuple[Tokenizer, TextTokenizer]:
    tokenizer = Tokenizer.from_file(str(tokenizer_files(name) / "tokenizer.json")) if name in NAMES else MADE[name]()
    return tokenizer, TextTokenizer(tokenizer)


HARD = [
    "  é<x><x>", "éé\xa0<x><x>\x7f", " <x>鬼<y> w", " <x>鬼", "  <x>é", "  <x>Å", "   <x>x", "\r\n   <x>x", "Å<y>\u2028", "<y> é", "",
    "\x00", "a\u200db", "\ufeffe\u0301", "  <x>  <y>  <z> <z>z", "don't  0123 일\u1100\u1161",
]  # fmt: skip
CUTS = st.tuples(st.floats(0, 1), st.floats(0, 1))


def obeys(name: str, texts: Sequence[str], cut: tuple[float, float]) -> None:
    tokenizer, ours = made(name)
    for text, tokenized in zip(texts, ours(texts), strict=True):
        encoding = tokenizer.encode(text, add_special_tokens=False)
        assert tokenized is not None and tokenized.ids.tolist() == encoding.ids
        chosen = sorted(round(part * len(text)) for part in cut)
        for start, end in [chosen, *([at, at + 1] for at in range(len(text)))]:
            expected = [number for number, (a, b) in enumerate(encoding.offsets) if a < end and start < b and start < end]
            assert list(range(len(encoding.ids)))[tokenized.between(start, end)] == expected, (text, start, end)


@pytest.mark.parametrize("name", [*MADE, *NAMES])
@settings(max_examples=20, deadline=None)
@given(texts=st.lists(TEXTS, min_size=1, max_size=3), cut=CUTS)
@example(HARD, (0.0, 1.0))
@example(HARD, (0.3, 0.9))
def test_tokens_between_two_characters_are_those_whose_offsets_overlap_them(name: str, texts: list[str], cut: tuple[float, float]) -> None:
    obeys(name, texts, cut)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MADE, *NAMES])
@settings(max_examples=400, deadline=None)
@given(texts=st.lists(TEXTS, min_size=1, max_size=3), cut=CUTS)
def test_tokens_between_two_characters_at_length(name: str, texts: list[str], cut: tuple[float, float]) -> None:
    obeys(name, texts, cut)


@pytest.mark.parametrize("name", [*MADE, *NAMES])
def test_bytes_are_counted_where_tokens_are_the_bytes_of_the_text(name: str) -> None:
    """Not vacuous: the law above holds on both ways."""
    assert (made(name)[1]._num_bytes is not None) == (name in BY_LENGTHS or (name in NAMES and name != "gemma3"))


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_a_long_text_is_placed_to_its_last_character(name: str) -> None:
    tokenizer, ours = made(name)
    text = "naïve 日本語 e\u0301 🙂 x\n" * 8_000
    (tokenized,) = ours([text])
    encoding = tokenizer.encode(text, add_special_tokens=False)
    assert tokenized is not None and tokenized.ids.tolist() == encoding.ids
    last = tokenized.between(len(text) - 4, len(text) - 3)
    assert [number for number, (a, b) in enumerate(encoding.offsets) if a < len(text) - 3 and len(text) - 4 < b] == list(
        range(len(encoding.ids))
    )[last]


@pytest.mark.parametrize("name", ["bytes", "sentencepiece"])
def test_half_of_a_surrogate_pair_costs_only_its_own_text(name: str) -> None:
    _, ours = made(name)
    found = ours(["one", "a\ud83d", "\udc00", "", "two"])
    assert [None if tokenized is None else tokenized.ids.tolist() for tokenized in found] == [
        ours(["one"])[0].ids.tolist(), None, None, [], ours(["two"])[0].ids.tolist()  # type: ignore[union-attr]
    ]  # fmt: skip


def test_a_tokenizer_that_cuts_at_random_is_refused(tokenizer_folder: Callable[[str], Path], tmp_path: Path) -> None:
    import json
    import shutil

    from tests.template import kinds

    folder = shutil.copytree(tokenizer_folder(kinds.CHATML), tmp_path / "tokenizer")
    form = json.loads((folder / "tokenizer.json").read_text())
    form["model"]["dropout"] = 0.1
    (folder / "tokenizer.json").write_text(json.dumps(form))
    with pytest.raises(ConfigError, match=r"cuts at random \(dropout 0.1\)"):
        Template(folder)

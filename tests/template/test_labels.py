"""From character spans to token weights, on the tokenizer's own encodings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from tests.template import kinds
from twinkle_core.template import Template
from twinkle_core.template.labels import Tokens, outcome, token_weights
from twinkle_core.template.tokenized import TextTokenizer
from twinkle_core.types import IGNORE, DocumentKind

Folder = Callable[[str], Path]
PIECES = ["🙂", "👩‍👩‍👧", "e\u0301", "one two", " ", "\n\n", "<|im_end|>", "日本", "x"]


@pytest.fixture(scope="module")
def whole(tokenizer_folder: Folder) -> Any:
    return Template(tokenizer_folder(kinds.CHATML)).tokenizer.backend_tokenizer


@given(
    before=st.lists(st.sampled_from(PIECES), max_size=3),
    inside=st.sampled_from(PIECES),
    after=st.lists(st.sampled_from(PIECES), max_size=3),
)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_span_takes_every_token_that_shares_a_character_with_it(whole: Any, before: list[str], inside: str, after: list[str]) -> None:
    start = len("".join(before))
    end = start + len(inside)
    text = "".join([*before, inside, *after])
    encoding = whole.encode(text, add_special_tokens=False)
    (tokenized,) = TextTokenizer(whole)([text])
    assert tokenized is not None and tokenized.ids.tolist() == encoding.ids
    weights = token_weights(tokenized, [(start, end, 0.5)], 0.0)
    assert weights.tolist() == [0.5 if a < end and start < b else 0.0 for a, b in encoding.offsets]
    assert weights.any()


def test_all_tokens_of_an_emoji_are_taken_and_the_last_of_two_spans_wins(whole: Any) -> None:
    (tokenized,) = TextTokenizer(whole)(["x🙂y"])
    assert tokenized is not None and len(tokenized.ids) == 6
    assert token_weights(tokenized, [(1, 2, 1.0)], 0.0).tolist() == [0, 1, 1, 1, 1, 0]
    assert token_weights(tokenized, [(0, 3, 1.0), (1, 2, 0.25)], 0.5).tolist() == [1, 0.25, 0.25, 0.25, 0.25, 1]
    assert token_weights(tokenized, [], 0.5).dtype == np.float32


@pytest.mark.parametrize("end", [0, 1])
def test_an_empty_span_takes_nothing(end: int, whole: Any) -> None:
    (tokenized,) = TextTokenizer(whole)(["xy"])
    assert tokenized is not None
    assert not token_weights(tokenized, [(end, end, 1.0)], 0.0).any()


@pytest.mark.parametrize(
    ("added", "head"),
    [
        (AddedToken("<a>", normalized=False), 5),
        (AddedToken("<a>", normalized=False, rstrip=True), 0),
        (AddedToken("<a>", normalized=False, lstrip=True), 0),
        (AddedToken("<a>", normalized=False, single_word=True), 0),
        (AddedToken("<a>", normalized=True), 0),
    ],
)
def test_a_shared_start_is_cut_only_where_its_tokens_stay_the_same_whatever_follows(whole: Any, added: AddedToken, head: int) -> None:
    tokenizer = Tokenizer.from_str(whole.to_str())
    tokenizer.add_tokens([added])
    tokenize = TextTokenizer(tokenizer)
    assert tokenize._cut("x <a> y")[0] == head
    for text in ("x <a> y", "x <a>y", "x <a>\n\ny", "x <a>a>y"):
        (tokenized,) = tokenize([text], [len("x <a>")])
        assert tokenized is not None and tokenized.ids.tolist() == tokenizer.encode(text, add_special_tokens=False).ids


def test_a_shared_start_is_not_cut_inside_a_longer_added_token(whole: Any) -> None:
    tokenizer = Tokenizer.from_str(whole.to_str())
    tokenizer.add_tokens([AddedToken("<a>", normalized=False), AddedToken("<a>b", normalized=False)])
    tokenize = TextTokenizer(tokenizer)
    for text in ("x <a>y", "x <a>by"):
        (tokenized,) = tokenize([text], [len("x <a>")])
        assert tokenized is not None and tokenized.ids.tolist() == tokenizer.encode(text, add_special_tokens=False).ids


def test_a_shared_start_is_not_cut_before_a_token_that_looks_at_its_neighbour(whole: Any) -> None:
    tokenizer = Tokenizer.from_str(whole.to_str())
    tokenizer.add_tokens([AddedToken("AA", normalized=False), AddedToken("BB", normalized=False, single_word=True)])
    (tokenized,) = TextTokenizer(tokenizer)(["x AABB"], [len("x AA")])
    assert tokenized is not None and tokenized.ids.tolist() == tokenizer.encode("x AABB", add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("learnt", "predicted", "truncated"),
    [  # of tokens 0 to 8 with a limit of 4: what each sample is to predict, and the tokens that are in none
        ([6, 7], [[6, 7]], 5),  # as in ChatML, where a line end follows the stop token 7: it is learnt, and token 8 left out
        ([1, 2, 3, 4, 5, 6, 7], [[1, 2, 3], [5, 6, 7]], 1),
        ([1, 2, 3, 4, 5, 6, 7, 8], [[1, 2, 3], [5, 6], [8]], 0),
        ([8], [[8]], 7),
    ],
)
def test_a_single_token_at_the_end_gets_the_one_before_it_only_where_it_is_learnt(
    learnt: list[int], predicted: list[list[int]], truncated: int
) -> None:
    document = Tokens(np.arange(9, dtype=np.int32), np.isin(np.arange(9), learnt).astype(np.float32), DocumentKind.PLAIN)
    made = outcome([document], "split", 4, False)
    assert [[label for label in sample.labels.tolist() if label != IGNORE] for sample in made.samples] == predicted
    assert (made.num_tokens, made.truncated_tokens) == (9, truncated)

"""What is learnt of each kind of trajectory, and what truncation leaves of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.template import kinds
from twinkle_core.config import TemplateConfig
from twinkle_core.errors import DataError
from twinkle_core.template import Template
from twinkle_core.types import IGNORE, DocumentKind, EncodedSample, Trajectory

Folder = Callable[[str], Path]


def row(*messages: Any, **more: Any) -> Trajectory:
    """Roles by first letter: 'u: hello'."""
    roles = {"s": "system", "u": "user", "a": "assistant"}
    said = [{"role": roles[m[0]], "content": m[3:]} if isinstance(m, str) else m for m in messages]
    return {"messages": said, **more}  # type: ignore[return-value, typeddict-item]


def learnt(template: Template, sample: EncodedSample) -> list[list[str]]:
    """Supervised stretches of each document, after checking that each label is the next token of the same document."""
    found = []
    ends = np.cumsum(sample.seq_lens)
    for start, end in zip(ends - sample.seq_lens, ends, strict=True):
        ids, labels = sample.input_ids[start:end], sample.labels[start:end]
        at = np.flatnonzero(labels != IGNORE)
        assert labels[-1] == IGNORE
        assert (labels[at] == ids[at + 1]).all()
        stretches = np.split(at, np.flatnonzero(np.diff(at) != 1) + 1) if len(at) else []
        found.append([template.decode(labels[stretch]) for stretch in stretches])
    return found


def one(template: Template, trajectory: Trajectory) -> EncodedSample:
    (sample,) = template.batch_encode([trajectory])
    return sample


def test_text_is_learnt_whole_with_the_tokenizers_own_special_tokens_and_an_end(tokenizer_folder: Folder) -> None:
    template = Template(tokenizer_folder(kinds.CHATML))
    own = template.tokenizer("hello there word")["input_ids"]
    assert own[0] == template.tokenizer.bos_token_id
    sample = one(template, {"messages": [], "text": "hello there word"})
    assert sample.input_ids.tolist() == [*own, template.tokenizer.eos_token_id]
    assert learnt(template, sample) == [["hello there word<|im_end|>"]]
    assert sample.loss_weights is None


def test_a_pair_is_two_documents_of_which_only_the_answers_are_learnt(tokenizer_folder: Folder) -> None:
    template = Template(tokenizer_folder(kinds.CHATML))
    chosen = row("s: s", "u: q", "a: shared", "u: q2", "a: good one")["messages"]
    rejected = [*chosen[:-1], {"role": "assistant", "content": "bad"}]
    sample = one(template, {"messages": chosen, "rejected_messages": rejected})  # type: ignore[typeddict-item]
    assert sample.kinds.tolist() == [DocumentKind.CHOSEN, DocumentKind.REJECTED]
    assert learnt(template, sample) == [["good one<|im_end|>"], ["bad<|im_end|>"]]
    assert template.decode(sample.input_ids[: sample.seq_lens[0]]).count("shared") == 1
    with pytest.raises(DataError, match="nothing is preferred"):
        template.encode({"messages": chosen, "rejected_messages": chosen})


@pytest.mark.parametrize(("desirable", "kind"), [(True, DocumentKind.DESIRABLE), (False, DocumentKind.UNDESIRABLE)])
def test_of_a_judged_conversation_the_judged_answer_is_learnt(desirable: bool, kind: DocumentKind, tokenizer_folder: Folder) -> None:
    template = Template(tokenizer_folder(kinds.CHATML))
    sample = one(template, row("u: q", "a: one", "u: q2", "a: two", desirable=desirable))
    assert sample.kinds.tolist() == [kind]
    assert learnt(template, sample) == [["two<|im_end|>"]]


def test_a_prompt_ends_where_the_answer_starts_and_carries_no_label(tokenizer_folder: Folder) -> None:
    template = Template(tokenizer_folder(kinds.CHATML), default_system="be kind")
    sample = one(template, row("u: q", "a: one", "u: q2", prompt_only=True))
    assert sample.kinds.tolist() == [DocumentKind.PROMPT]
    followed = one(template, row("u: q", "a: one", "u: q2"))
    assert learnt(template, followed) == [["one<|im_end|>"]], "a question after the last answer takes nothing from it"
    assert template.decode(sample.input_ids).endswith("q2<|im_end|>\n<|im_start|>assistant\n")
    assert (sample.labels == IGNORE).all()
    assert template.render_prompt(row("u: q", "a: one", "u: q2")) != sample.input_ids.tolist()  # up to the last answer
    assert template.render_prompt(row("u: q")) == one(template, row("u: q")).input_ids.tolist()
    whole = template.encode(row("u: q", "a: one"), add_generation_prompt=True)
    assert template.decode(whole.input_ids).endswith("one<|im_end|>\n<|im_start|>assistant\n")
    with pytest.raises(DataError, match="text without messages"):
        template.encode({"messages": [], "text": "x"}, add_generation_prompt=True)


def test_embedding_texts_are_documents_without_labels(tokenizer_folder: Folder) -> None:
    template = Template(tokenizer_folder(kinds.CHATML))
    sample = one(template, {"messages": [], "embedding": {"anchor": "one", "positive": "two two", "negatives": ["three", "four"]}})
    expected = [template.tokenizer(text)["input_ids"] for text in ("one", "two two", "three", "four")]
    assert np.split(sample.input_ids, np.cumsum(sample.seq_lens)[:-1])[1].tolist() == expected[1]
    assert sample.input_ids.tolist() == [token for ids in expected for token in ids]
    assert sample.kinds.tolist() == [DocumentKind.ANCHOR, DocumentKind.POSITIVE, DocumentKind.NEGATIVE, DocumentKind.NEGATIVE]
    assert (sample.labels == IGNORE).all()


WEIGHED = [
    {"role": "user", "content": "ask", "loss_weight": 1.0},
    {"role": "assistant", "content": "one", "loss_weight": 0},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "two", "loss_weight": 0.5},
    {"role": "user", "content": "last"},
    {"role": "assistant", "content": "three"},
]


@pytest.mark.parametrize("kind", ["CHATML", "TAGGED", "TAGGED_WITHOUT_STOP", "TAGGED_IN_PARTS", "BOS", "LOOKS_INTO_USER"])
def test_a_turns_own_weight_goes_before_the_rule(kind: str, tokenizer_folder: Folder) -> None:
    template = Template(tokenizer_folder(getattr(kinds, kind)))
    sample = one(template, row(*WEIGHED))
    assert learnt(template, sample) == [["ask<|im_end|>", "two<|im_end|>", "three<|im_end|>"]]
    assert sample.loss_weights is not None
    pieces = {weight: template.decode(sample.labels[(sample.labels != IGNORE) & (sample.loss_weights == weight)]) for weight in (0.5, 1.0)}
    assert pieces == {0.5: "two<|im_end|>", 1.0: "ask<|im_end|>three<|im_end|>"}
    last = Template(tokenizer_folder(getattr(kinds, kind)), learn="last_turn")
    assert learnt(last, one(last, row(*WEIGHED))) == [["ask<|im_end|>", "two<|im_end|>", "three<|im_end|>"]]


def test_blocks_of_several_turns_keep_their_own_weights(tokenizer_folder: Folder) -> None:
    template = Template(tokenizer_folder(kinds.TAGGED_IN_PARTS))
    sample = one(template, row("u: q", {"role": "assistant", "content": "one", "loss_weight": 0.5}, "u: q", "a: two"))
    assert sample.loss_weights is not None
    assert template.decode(sample.labels[sample.loss_weights == 0.5]) == "one<|im_end|>"
    assert template.decode(sample.labels[sample.loss_weights == 1]) == "two<|im_end|>"


def test_weights_of_nought_and_one_need_no_weights(tokenizer_folder: Folder) -> None:
    template = Template(tokenizer_folder(kinds.CHATML))
    sample = one(template, row("u: q", {"role": "assistant", "content": "one", "loss_weight": 0}, "u: q", "a: two"))
    assert sample.loss_weights is None
    assert learnt(template, sample) == [["two<|im_end|>"]]


def test_prompts_are_learnt_too_but_for_turns_without_weight(tokenizer_folder: Folder) -> None:
    template = Template(tokenizer_folder(kinds.CHATML), learn="all")
    sample = one(template, row("u: q", "a: one"))
    assert (sample.labels[:-1] == sample.input_ids[1:]).all()
    (stretches,) = learnt(template, one(template, row({"role": "user", "content": "hello", "loss_weight": 0}, "a: one")))
    assert stretches == ["user\n", "\n<|im_start|>assistant\none<|im_end|>\n"]


@pytest.mark.parametrize("weight", [-1, float("nan"), True, "1"])
def test_a_weight_that_is_none_is_refused(weight: Any, tokenizer_folder: Folder) -> None:
    with pytest.raises(DataError, match="turn 2: loss_weight is"):
        Template(tokenizer_folder(kinds.CHATML)).encode(row("u: q", {"role": "assistant", "content": "x", "loss_weight": weight}))


def test_a_user_turn_that_cannot_be_told_apart_is_refused(tokenizer_folder: Folder) -> None:
    with pytest.raises(DataError, match=r"turn 1 \(user\) cannot be told apart"):
        Template(tokenizer_folder(kinds.REWRITES)).encode(row({"role": "user", "content": "q", "loss_weight": 1}, "a: x"))


def test_a_template_that_tags_everything_is_refused_and_one_that_tags_a_variable_is_placed(tokenizer_folder: Folder) -> None:
    with pytest.raises(DataError, match="whole conversation"):
        Template(tokenizer_folder(kinds.ALL_TAGGED)).encode(row("u: q", "a: x"))
    template = Template(tokenizer_folder(kinds.TAGGED_IN_A_VARIABLE))
    assert learnt(template, one(template, row("u: q", "a: x", "u: q", "a: y"))) == [["x<|im_end|>", "y<|im_end|>"]]


def test_nothing_to_learn_is_an_error_or_a_counted_drop(tokenizer_folder: Folder) -> None:
    silent = row("u: q", {"role": "assistant", "content": "x", "loss_weight": 0})
    with pytest.raises(DataError, match="conversation 2: no supervised token is left: nothing to learn"):
        Template(tokenizer_folder(kinds.CHATML)).outcomes([row("u: q", "a: x"), silent])
    dropping = Template(tokenizer_folder(kinds.CHATML), truncation_strategy="delete")
    assert [outcome.dropped for outcome in dropping.outcomes([row("u: q", "a: x"), silent])] == [None, "no_loss"]


def test_bad_rows_are_skipped_with_their_reason_where_the_user_says_so(tokenizer_folder: Folder) -> None:
    template = Template(tokenizer_folder(kinds.CHATML), TemplateConfig(on_bad_row="skip", max_length=30))
    bad = [
        row("u: q", {"role": "assistant", "content": None}),
        row({"role": "user", "content": [{"type": "image", "image": "x.png"}]}, "a: x"),
        row("u: " + "word " * 60, "a: x"),
        row("u: \ud83d", "a: x"),
        row("u: q", "a: x", images=["x.png"]),
    ]
    outcomes = template.outcomes([row("u: q", "a: fine"), *bad, row("u: q", "a: fine")])
    reasons = [outcome.refused for outcome in outcomes]
    assert reasons[0] is reasons[-1] is None
    for reason, words in zip(reasons[1:-1], ["no content", "'image'", "max_length is 30", "surrogate", "has images"], strict=True):
        assert reason is not None
        assert words in reason
    assert [len(outcome.samples) for outcome in outcomes] == [1, 0, 0, 0, 0, 0, 1]
    assert template.batch_check([row("u: q", "a: fine"), bad[0]]) == [row("u: q", "a: fine"), None]


def test_text_parts_are_joined_and_calls_without_content_are_the_empty_text(tokenizer_folder: Folder) -> None:
    template = Template(tokenizer_folder(kinds.TOOLS))
    parts = [{"type": "text", "text": "hello "}, {"type": "text", "text": "there"}]
    assert one(template, row({"role": "user", "content": parts}, "a: x")).input_ids.tolist() == (
        one(template, row("u: hello there", "a: x")).input_ids.tolist()
    )
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    empty, null = (row("u: q", {"role": "assistant", "content": c, "tool_calls": [call]}, "a: x") for c in ("", None))
    assert one(template, empty).input_ids.tolist() == one(template, null).input_ids.tolist()
    assert '<call>f {"a": 1}</call>' in template.decode(one(template, null).input_ids)


READ = {"type": "function", "function": {"name": "read", "parameters": {}}}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "read", "arguments": {"p": "x"}}}]}


@pytest.mark.parametrize("kind", ["CHATML", "TAGGED", "REWRITES", "LOOKS_INTO_USER", "TOOLS"])
@pytest.mark.parametrize(
    "trajectory",
    [row("u: 42", "a: x", tools=[READ]), row("u: 42", CALL, "a: x"), row("u: 42", CALL, "a: x", tools=[READ])],
    ids=["tools", "calls", "both"],
)
def test_tools_that_the_chat_template_does_not_print_are_reported(kind: str, trajectory: Trajectory, tokenizer_folder: Folder) -> None:
    template = Template(tokenizer_folder(getattr(kinds, kind)))
    (outcome,) = template.outcomes([trajectory])
    assert outcome.unprinted_tools == (kind != "TOOLS")
    (stretches,) = learnt(template, outcome.samples[0])
    if kind == "TOOLS":
        assert stretches[-1] == "<think></think>x<|im_end|>"
        assert len(stretches) == len(trajectory["messages"]) - 1
    else:
        assert stretches == ["X<|im_end|>" if kind == "REWRITES" else "x<|im_end|>"]
    assert not template.outcomes([row("u: 42", "a: x")])[0].unprinted_tools


@given(
    words=st.integers(1, 60), limit=st.integers(3, 40), rule=st.sampled_from(["left", "right", "split", "delete"]),
    kind=st.sampled_from(["text", "conversation", "preference", "prompt", "judged"]),
)  # fmt: skip
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_truncation_neither_loses_nor_doubles_a_token_uncounted(
    tokenizer_folder: Folder, words: int, limit: int, rule: Any, kind: str
) -> None:
    folder = tokenizer_folder(kinds.CHATML)
    question, answer = "u: " + " ".join(["one"] * (words // 2)), "a: " + " ".join(["two"] * words)
    trajectory = {
        "text": {"messages": [], "text": answer},
        "conversation": row(question, answer),
        "preference": row(question, answer, rejected_messages=row(question, "a: no")["messages"]),
        "prompt": row(question, answer, question, prompt_only=True),
        "judged": row(question, answer, desirable=True),
    }[kind]
    whole = Template(folder, max_length=10**6).encode(trajectory)  # type: ignore[arg-type]
    template = Template(folder, TemplateConfig(max_length=limit, truncation=rule, on_bad_row="skip"))
    (outcome,) = template.outcomes([trajectory])  # type: ignore[list-item]
    samples = outcome.samples
    fits = max(whole.seq_lens) <= limit
    if outcome.refused is not None:
        assert not fits
        assert "no supervised token is left after truncation" in outcome.refused
        return
    assert outcome.num_tokens == len(whole.input_ids)
    if not samples:
        assert not fits
        assert outcome.dropped == "too_long"
        assert rule == "delete" or (rule == "split" and kind not in ("text", "conversation"))
        return
    assert sum(len(sample.input_ids) for sample in samples) + outcome.truncated_tokens == outcome.num_tokens
    for sample in samples:
        assert max(sample.seq_lens) <= limit
        learnt(template, sample)
    if fits:
        assert samples[0].input_ids.tolist() == whole.input_ids.tolist()
    elif rule == "split":
        joined = np.concatenate([sample.input_ids for sample in samples])
        assert whole.input_ids.tolist()[outcome.truncated_tokens :] == joined.tolist() or kind == "conversation"
        if kind == "text":
            assert outcome.truncated_tokens == 0
    else:
        documents = zip(np.split(whole.input_ids, np.cumsum(whole.seq_lens)[:-1]), samples[0].seq_lens, strict=True)
        kept = [ids[-length:] if rule == "left" else ids[:length] for ids, length in documents]
        assert samples[0].input_ids.tolist() == np.concatenate(kept).tolist()


def test_a_cut_is_not_predicted_across_and_pieces_without_labels_are_counted(tokenizer_folder: Folder) -> None:
    folder = tokenizer_folder(kinds.CHATML)
    template = Template(folder, max_length=8, truncation_strategy="split")
    (outcome,) = template.outcomes([row("u: " + "word " * 20, "a: one two three four")])
    assert outcome.truncated_tokens > 8
    assert outcome.truncated_tokens % 8 == 0  # whole pieces of the prompt
    assert len(outcome.samples) == 2 or len(outcome.samples) == 1
    assert all(sample.labels[-1] == IGNORE and sample.num_loss_tokens for sample in outcome.samples)
    with pytest.raises(DataError, match="cut into"):
        template.encode({"messages": [], "text": "word " * 20})


def test_sampled_tokens_are_appended_and_learnt_as_they_are(tokenizer_folder: Folder) -> None:
    template = Template(tokenizer_folder(kinds.CHATML))
    prompt = template.encode(row("u: q"), add_generation_prompt=True)
    feature: dict[str, Any] = {
        "input_ids": prompt.input_ids, "labels": prompt.labels, "seq_lens": prompt.seq_lens, "kinds": prompt.kinds, "messages": [],
    }  # fmt: skip
    new = [7, 300, 2]
    grown = template.concat_input_feature(feature, new)
    assert grown["input_ids"].tolist() == [*prompt.input_ids.tolist(), *new]
    assert grown["labels"].tolist() == [IGNORE] * (len(prompt.input_ids) - 1) + [*new, IGNORE]
    assert grown["length"] == len(grown["position_ids"]) == len(prompt.input_ids) + 3
    assert "kinds" not in grown
    assert "messages" in grown
    again = template.concat_input_feature(grown, [9])
    assert again["labels"].tolist()[-5:] == [*new, 9, IGNORE]
    assert grown["input_ids"].tolist()[-3:] == new  # not changed in place

"""Random conversations, and what each chat template has the assistant write of them, said a second time in Python."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

Messages = list[dict[str, Any]]

_PARTS = [
    "yes", " no", "\n", "\n\n", "  ", "42", "é", "e\u0301", "\u0301", "🙂", "👩‍👩‍👧", "日本語", "שלום", "\u2028", "\t", "\u200d", "</s>",
    "<|im_end|>", "<|im_start|>user\n", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<｜end▁of▁sentence｜>", "[/INST]",
    "MARKx0x", '"', "\\", "{{ x }}",
    "<tool_call>", "ﬁ", "\u00a0", "'ll",
]  # fmt: skip
texts = st.one_of(
    st.lists(st.sampled_from(_PARTS), max_size=5).map("".join), st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=8)
)
said = texts.filter(lambda text: bool(text.strip()))
names = st.sampled_from(["read", "write_file", "f"])
values = st.one_of(texts, st.integers(-5, 5), st.booleans(), st.lists(texts, max_size=2))
tools_lists = st.lists(
    st.builds(
        lambda name, text: {
            "type": "function",
            "function": {"name": name, "description": text, "parameters": {"type": "object", "properties": {"p": {"type": "string"}}}},
        },
        names,
        texts,
    ),
    min_size=1,
    max_size=2,
)


@st.composite
def calls(draw: st.DrawFn, most: int) -> list[dict[str, Any]]:
    arguments = draw(
        st.lists(st.dictionaries(st.sampled_from(["p", "q", "a-b <|im_end|>"]), values, max_size=3), min_size=1, max_size=most)
    )
    return [{"type": "function", "function": {"name": draw(names), "arguments": each}} for each in arguments]


@st.composite
def conversations(
    draw: st.DrawFn, *, calls_a_turn: int = 0, thinks: bool = False, system: bool = True, most_rounds: int = 3, answer: Any = texts
) -> Messages:
    messages: Messages = [{"role": "system", "content": draw(said)}] if system and draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, most_rounds))):
        messages.append({"role": "user", "content": draw(texts)})
        for _ in range(draw(st.integers(0, 2)) if calls_a_turn else 0):
            made = draw(calls(calls_a_turn))
            messages.append({"role": "assistant", "content": draw(st.sampled_from(["", "I look."])), "tool_calls": made})
            if thinks and draw(st.booleans()):
                messages[-1]["reasoning_content"] = draw(said)
            messages += [{"role": "tool", "content": draw(texts)} for _ in made]
        messages.append({"role": "assistant", "content": draw(answer)})
        if thinks:
            way = draw(st.sampled_from(["none", "field", "block"]))
            if way == "field":
                messages[-1]["reasoning_content"] = draw(said)
            elif way == "block":
                messages[-1]["content"] = f"<think>\n{draw(said)}\n</think>\n\n{draw(texts)}"
    return messages


def whole(stop: str) -> Any:
    return lambda messages: [m["content"] + stop for m in messages if m["role"] == "assistant"]


def stripped(stop: str) -> Any:
    return lambda messages: [m["content"].strip() + stop for m in messages if m["role"] == "assistant"]


def qwen3(messages: Messages) -> list[str]:
    """Qwen 3 keeps the thoughts after the last user turn, and writes an empty think block in the last turn."""
    last_query = max(n for n, m in enumerate(messages) if m["role"] == "user" and not _tool_response(m["content"]))
    written = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        content, thought = message["content"], message.get("reasoning_content", "")
        if "reasoning_content" not in message and "</think>" in content:
            thought = content.split("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n")
            content = content.split("</think>")[-1].lstrip("\n")
        last = number == len(messages) - 1
        if number > last_query and (last or thought):
            text = "<think>\n" + thought.strip("\n") + "\n</think>\n\n" + content.lstrip("\n")
        else:
            text = content
        for position, call in enumerate(message.get("tool_calls", [])):
            text += "\n" if position or content else ""
            text += f'<tool_call>\n{{"name": "{call["function"]["name"]}", "arguments": '
            text += json.dumps(call["function"]["arguments"], ensure_ascii=False) + "}\n</tool_call>"
        written.append(text + "<|im_end|>")
    return written


def _tool_response(content: str) -> bool:
    return content.startswith("<tool_response>") and content.endswith("</tool_response>")


def qwen3_not_thinking(messages: Messages) -> list[str]:
    """The prompt holds the empty think block that a last answer without thoughts starts with; other thoughts are the assistant's."""
    empty = "<think>\n\n</think>\n\n"
    return [text.removeprefix(empty) for text in qwen3(messages)]


def harmony(messages: Messages) -> list[str]:
    """Of `tests.tokenizers.HARMONY`: all after '<|start|>assistant'."""
    written = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        last, thought = number == len(messages) - 1, message.get("reasoning_content")
        shown = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if thought and (last or "tool_calls" in message) else ""
        if "tool_calls" in message:
            function = message["tool_calls"][0]["function"]
            arguments = json.dumps(function["arguments"], ensure_ascii=False)
            written.append(f"{shown} to=functions.{function['name']}<|channel|>commentary json<|message|>{arguments}<|call|>")
        else:
            written.append(f"{shown}<|channel|>final<|message|>{message['content']}{'<|return|>' if last else '<|end|>'}")
    return written

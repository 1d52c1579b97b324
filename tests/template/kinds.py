"""Chat templates of the constructs that are in use, and what the assistant writes in some of them."""

from __future__ import annotations

import json
from typing import Any

_PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + _PROMPT
TAGGED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}" + _PROMPT
)
TAGGED_WITHOUT_STOP = TAGGED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
TAGGED_IN_A_VARIABLE = TAGGED.replace("{% generation %}", "{% set text %}{% generation %}").replace(
    "{% endgeneration %}", "{% endgeneration %}{% endset %}{{ text }}"
)
TAGGED_IN_PARTS = TAGGED.replace(
    "{{ m.content }}<|im_end|>{% endgeneration %}", "{{ m.content }}{% endgeneration %}{% generation %}<|im_end|>{% endgeneration %}"
)
ALL_TAGGED = "{% generation %}" + CHATML + "{% endgeneration %}"
STRIPS = CHATML.replace("{{ m.content }}", "{{ m.content | trim }}")
REWRITES = CHATML.replace("{{ m.content }}", "{{ m.content | upper }}")
BOS = "{{ bos_token }}" + CHATML
NO_STOP = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML
INST = (
    "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}"
    "{% set system = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}"
    "{% else %}{% set rest = messages %}{% set system = '' %}{% endif %}"
    "{% for m in rest %}{% if m.role == 'user' %}"
    "{{ bos_token + '[INST] ' + (system if loop.first else '') + m.content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
DROPS_THINK = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and '</think>' in m.content and not loop.last %}{{ m.content.split('</think>')[-1].lstrip('\\n') }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}" + _PROMPT
)
TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}\n<result>{{ m.content }}</result>"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}"
    "</call>{% endfor %}<|im_end|>\n{% endif %}"
    "{% endfor %}" + _PROMPT
)
LOOKS_INTO_USER = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% if m.role == 'user' and '42' in m.content %}<|im_start|>note\nforty-two<|im_end|>\n{% endif %}{% endfor %}" + _PROMPT
)
ENDS_WITH_NEXT_ROLE = (
    "{% for m in messages %}{{ '<|im_end|>' if m.role == 'assistant' else '<|im_start|>' }}\n{{ m.content }}{% endfor %}<|im_start|>"
    "{% if add_generation_prompt %}<|im_end|>\n{% endif %}"
)
"""GLM 4's way: the next role's token ends a turn."""

Messages = list[dict[str, Any]]


def _answers(messages: Messages) -> list[tuple[dict[str, Any], bool]]:
    return [(message, number == len(messages) - 1) for number, message in enumerate(messages) if message["role"] == "assistant"]


def written_drops_think(messages: Messages) -> list[str]:
    return [
        (message["content"] if last or "</think>" not in message["content"] else message["content"].split("</think>")[-1].lstrip("\n"))
        + "<|im_end|>"
        for message, last in _answers(messages)
    ]


def written_tools(messages: Messages) -> list[str]:
    written = []
    for message, last in _answers(messages):
        calls = [call["function"] for call in message.get("tool_calls", [])]
        printed = "".join(f"<call>{call['name']} {json.dumps(call['arguments'], ensure_ascii=False)}</call>" for call in calls)
        written.append(("<think></think>" if last else "") + message["content"] + printed + "<|im_end|>")
    return written


def written_next_role(messages: Messages) -> list[str]:
    return [message["content"] + "<|im_start|>" for message, _ in _answers(messages)]

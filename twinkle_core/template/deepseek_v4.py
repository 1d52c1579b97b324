"""DeepSeek V4's chat format, which comes without a chat template: the model's folder has `encoding/encoding_dsv4.py` instead.

The format is written here as a chat template after the description in
https://huggingface.co/deepseek-ai/DeepSeek-V4-Pro/blob/main/encoding/README.md. Python code of the folder is never run; the text
that describes tools to the model is read out of it as a string. Left out: the roles `developer` and `latest_reminder`, quick
instruction tasks, and the prefix of the highest reasoning effort.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path

from twinkle_core.errors import ConfigError
from twinkle_core.template.base import Template

ENCODING_FILE = "encoding/encoding_dsv4.py"

CHAT_TEMPLATE = r"""
{%- set thinking = enable_thinking is defined and enable_thinking -%}
{%- set keep_reasoning = tools is defined and tools -%}
{%- set ns = namespace(last_user=-1, ids=[], results=[], sorted=[], printed=0) -%}
{%- for message in messages -%}
  {%- if message.role in ['user', 'tool'] -%}{%- set ns.last_user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{{- '<｜begin▁of▁sentence｜>' -}}
{%- macro describe_tools() -%}
  {%- if tools_before is not defined -%}
    {{- raise_exception('tools need ENCODING_FILE in the folder of the model: it holds the text that describes them') -}}
  {%- endif -%}
  {{- '\n\n' + tools_before -}}
  {%- for tool in tools -%}{{- '\n' if not loop.first -}}{{- tool.function | tojson -}}{%- endfor -%}
  {{- tools_after -}}
{%- endmacro -%}
{%- macro call_tools(calls) -%}
  {{- '\n\n<｜DSML｜tool_calls>\n' -}}
  {%- for call in calls -%}
    {%- if call.function.arguments is string -%}{{- raise_exception('arguments of a tool call must be an object, not text') -}}{%- endif -%}
    {{- '<｜DSML｜invoke name="' + call.function.name + '">\n' -}}
    {%- for key, value in call.function.arguments.items() -%}
      {{- '\n' if not loop.first -}}{{- '<｜DSML｜parameter name="' + key + '" string="' -}}
      {{- 'true">' + value if value is string else 'false">' + value | tojson -}}{{- '</｜DSML｜parameter>' -}}
    {%- endfor -%}
    {{- '\n</｜DSML｜invoke>\n' -}}
  {%- endfor -%}
  {{- '</｜DSML｜tool_calls>' -}}
{%- endmacro -%}
{%- if keep_reasoning and messages[0].role != 'system' -%}{{- describe_tools() -}}{%- endif -%}
{%- for message in messages -%}
  {%- set index = loop.index0 -%}
  {%- set content = message.content or '' -%}
  {%- if message.role == 'system' -%}
    {{- content -}}{%- if loop.first and keep_reasoning -%}{{- describe_tools() -}}{%- endif -%}
  {%- elif message.role in ['user', 'tool'] -%}
    {%- if loop.first or loop.previtem.role not in ['user', 'tool'] -%}
      {{- '<｜User｜>' -}}
      {%- set ns.results = [] -%}{%- set ns.sorted = [] -%}{%- set ns.printed = 0 -%}
      {%- for other in messages[index:] -%}
        {%- if other.role not in ['user', 'tool'] -%}{%- break -%}{%- endif -%}
        {%- if other.role == 'tool' -%}{%- set ns.results = ns.results + [other] -%}{%- endif -%}
      {%- endfor -%}
      {%- for id in ns.ids or [none] -%}
        {%- set place = loop.index0 -%}
        {%- for result in ns.results -%}
          {%- set called = result.tool_call_id if result.tool_call_id is defined else none -%}
          {%- if (ns.ids.index(called) if called in ns.ids else 0) == place -%}{%- set ns.sorted = ns.sorted + [result] -%}{%- endif -%}
        {%- endfor -%}
      {%- endfor -%}
    {%- else -%}{{- '\n\n' -}}{%- endif -%}
    {%- if message.role == 'user' -%}{{- content -}}{%- else -%}
      {{- '<tool_result>' + (ns.sorted[ns.printed].content or '') + '</tool_result>' -}}{%- set ns.printed = ns.printed + 1 -%}
    {%- endif -%}
    {%- if (add_generation_prompt if loop.last else loop.nextitem.role == 'assistant') -%}
      {{- '<｜Assistant｜>' + ('<think>' if thinking and (keep_reasoning or index >= ns.last_user) else '</think>') -}}
    {%- endif -%}
  {%- elif message.role == 'assistant' -%}
    {%- set reasoning = message.reasoning_content or '' -%}
    {%- if not reasoning and '</think>' in content -%}
      {%- set reasoning = content.split('</think>')[0].split('<think>')[-1] -%}
      {%- set content = content.split('</think>', 1)[1] -%}
    {%- endif -%}
    {%- if reasoning and enable_thinking is not defined -%}
      {{- raise_exception('an answer has reasoning: set enable_thinking true to learn it, or false to leave it out') -}}
    {%- endif -%}
    {%- generation -%}
      {%- if thinking and (keep_reasoning or index > ns.last_user) -%}{{- reasoning + '</think>' -}}{%- endif -%}
      {{- content -}}{%- if message.tool_calls -%}{{- call_tools(message.tool_calls) -}}{%- endif -%}{{- '<｜end▁of▁sentence｜>' -}}
    {%- endgeneration -%}
    {%- if message.tool_calls -%}{%- set ns.ids = message.tool_calls | map(attribute='id', default=none) | list -%}{%- endif -%}
  {%- else -%}{{- raise_exception('unknown role ' + message.role) -}}{%- endif -%}
{%- endfor -%}
""".strip().replace("ENCODING_FILE", ENCODING_FILE)


class DeepseekV4Template(Template):
    """`Template` with DeepSeek V4's chat format (thinking and chat mode, tool calls as DSML), where the config names no other.

    enable_thinking: True renders reasoning (of the last turn, with tools of all turns), False leaves it out; without it a
    conversation with reasoning is refused. Tools are refused where the model's folder lacks the text that describes them.
    """

    tool_call_style = "dsml"

    def _own_chat_template(self) -> str:
        """Raises `ConfigError` where the model's text about tools cannot be read."""
        return read_chat_template(self.folder)


def read_chat_template(folder: Path) -> str:
    """The chat template, with the text about tools of the model in `folder` where it has one."""
    path = folder / ENCODING_FILE
    if not path.is_file():
        return CHAT_TEMPLATE
    before, placeholder, after = _tools_text(path).partition("{tool_schemas}")
    if not placeholder:
        raise ConfigError(f"TOOLS_TEMPLATE in {path} has no place {{tool_schemas}}")
    quoted = {"tools_before": json.dumps(before), "tools_after": json.dumps(after)}
    return "".join(f"{{%- set {name} = {text} -%}}" for name, text in quoted.items()) + CHAT_TEMPLATE


def _tools_text(path: Path) -> str:
    try:
        module = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    for node in module.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target if isinstance(node, ast.AnnAssign) else None
        value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
        if isinstance(target, ast.Name) and target.id == "TOOLS_TEMPLATE" and isinstance(value, ast.Constant):
            text = str(value.value)
            for name, token in (("dsml_token", "｜DSML｜"), ("thinking_start_token", "<think>"), ("thinking_end_token", "</think>")):
                text = text.replace(f"{{{name}}}", token)
            return text
    raise ConfigError(f"{path} has no text TOOLS_TEMPLATE")

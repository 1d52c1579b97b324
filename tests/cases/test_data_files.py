"""Reported faults of data files, with their right values (the case's name is in each docstring)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from storage.artifact import ArtifactRef
from storage.store import open_store
from tasks.encode import wanted_encoded
from tests.preprocessor.source_files import as_arrow_file, as_arrow_stream, as_parquet
from tests.servers import create_bucket, s3_server
from tests.tokenizers import train_tokenizer
from twinkle_core.config import SourceConfig, TemplateConfig
from twinkle_core.errors import DataError
from twinkle_core.preprocessor.formats import convert, detect
from twinkle_core.preprocessor.sources import open_source
from twinkle_core.preprocessor.sources.columnar import BATCH_BYTES
from twinkle_core.template import Template
from twinkle_core.types import IGNORE

ROOT = Path(__file__).parents[2]
CASES = ROOT.parent / "shared" / "cases"

pytestmark = pytest.mark.skipif(not CASES.is_dir(), reason="the shared cases are not here")
Rows = list[dict[str, Any]]


def expected(case: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((CASES / case / "expected.json").read_text(encoding="utf-8"))
    return values


def read(path: Path) -> Rows:
    return [row for _, row in open_source(SourceConfig(name="case", uri=str(path))).rows()]


def read_with_refusals(path: Path) -> tuple[Rows, dict[int, str]]:
    """Rows, and the reasons by line from 1."""
    refused: dict[int, str] = {}
    source = open_source(SourceConfig(name="case", uri=str(path)))
    return [row for _, row in source.rows(lambda place, reason: refused.update({place.number: reason}))], refused


def converted(row: dict[str, Any]) -> Any:
    return convert(row, detect(row))


CHATML = (
    "{% for m in messages %}{% if m.content is not none %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% else %}<|im_start|>{{ m.role }}\nNone{% endif %}{% for call in m.tool_calls or [] %}<call>{{ call.function.name }} "
    "{{ call.function.arguments | tojson }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Template:
    return Template(train_tokenizer(tmp_path_factory.mktemp("tokenizer"), CHATML))


def test_a_byte_order_mark_changes_no_record() -> None:
    """DS01"""
    right = expected("DS01")
    plain = read(CASES / "DS01" / right["same_records_as"])
    assert len(plain) == right["rows"]
    assert [list(row["meta"]) for row in plain] == right["meta_keys_per_row"]
    for name in ("bom.jsonl", "bom_crlf.jsonl"):
        assert read(CASES / "DS01" / name) == plain
    with pytest.raises(DataError, match=r"two_shards_cat\.jsonl, line 2: a byte order mark"):
        read(CASES / "DS01" / "two_shards_cat.jsonl")


def test_a_line_separator_inside_a_string_ends_no_record() -> None:
    """DS03"""
    rows = read(CASES / "DS03" / "ls.jsonl")
    assert len(rows) == expected("DS03")["rows"]
    assert rows[0]["messages"][0]["content"].replace("\u2028", " ").startswith("Shopping list: milk")
    assert [json.loads(line) for line in (CASES / "DS03" / "ls.jsonl").read_bytes().split(b"\n") if line] == rows


def test_blank_lines_are_skipped_and_a_bad_line_is_named() -> None:
    """DS05"""
    right = expected("DS05")["crlf_blank.jsonl"]
    rows = read(CASES / "DS05" / "crlf_blank.jsonl")
    assert [row["messages"][1]["content"] for row in rows] == right["answers"]
    with pytest.raises(DataError, match=r"bad_line4\.jsonl, line 4"):
        read(CASES / "DS05" / "bad_line4.jsonl")
    for name in ("empty.jsonl", "blank_only.jsonl"):
        with pytest.raises(DataError, match="no rows"):
            read(CASES / "DS05" / name)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_column_may_change_its_type_far_into_the_file(reverse: bool, tmp_path: Path) -> None:
    """DS06"""
    right = expected("DS06")
    small = read(CASES / "DS06" / "small.jsonl")
    assert (small[-1]["note"], small[-1]["score"]) == (right["last_note"], right["last_score"])
    made = subprocess.run([sys.executable, str(CASES / "DS06" / "gen.py"), "20000"], capture_output=True, check=True).stdout
    lines = made.splitlines()
    (tmp_path / "late.jsonl").write_bytes(b"\n".join(reversed(lines) if reverse else lines))
    rows = read(tmp_path / "late.jsonl")
    assert len(rows) == 20000
    late = [(row["note"], row["score"]) for row in rows if row["note"] is not None]
    assert sorted(late) == [(f"late note {number}", 0.5) for number in range(19995, 20000)]


@pytest.mark.parametrize("write", [None, as_parquet, as_arrow_file, as_arrow_stream])
def test_tools_and_arguments_come_back_as_they_were(write: Callable[[pa.Table], bytes] | None, tmp_path: Path, template: Template) -> None:
    """DS08"""
    right = expected("DS08")
    source = CASES / "DS08" / "tools.jsonl"
    written = [json.loads(line) for line in source.read_bytes().split(b"\n") if line]
    path = source
    if write is not None:
        path = tmp_path / ("tools.parquet" if write is as_parquet else "tools.arrow")
        path.write_bytes(write(pa.Table.from_pylist(written)))
    rows = read(path)
    assert rows == written
    assert len(rows) == right["rows"]
    for row, forbidden in zip(rows, right["must_not_appear_in_rendered_row"], strict=True):
        trajectory = converted(row)
        seen = json.dumps(trajectory["tools"]) + template.decode(template.encode(trajectory).input_ids)
        assert [text for text in forbidden if text in seen] == []


def test_a_null_content_is_empty_beside_calls_and_refused_without(template: Template) -> None:
    """DS10"""
    rows = read(CASES / "DS10" / "null_content.jsonl")
    samples = [template.encode(converted(row)) for row in rows[:2]]
    assert samples[0].input_ids.tolist() == samples[1].input_ids.tolist()
    assert samples[0].labels.tolist() == samples[1].labels.tolist()
    assert expected("DS10")["forbidden_in_render"] not in template.decode(samples[0].input_ids)
    for row in rows[2:]:
        with pytest.raises(DataError, match="content"):
            template.encode(converted(row))


def test_mixed_speaker_tags_are_read_and_an_unknown_speaker_is_named(template: Template) -> None:
    """DS12"""
    rows = read(CASES / "DS12" / "sharegpt_mix.jsonl")
    for row, learnt in zip(rows, expected("DS12")["supervised_text"], strict=True):
        if learnt is not None:
            sample = template.encode(converted(row))
            supervised = [label for label in sample.labels.tolist() if label != IGNORE]
            assert template.decode(supervised, skip_special_tokens=True).strip() == learnt
    assert [message["role"] for message in converted(rows[3])["messages"]] == ["user", "assistant", "tool", "assistant"]
    with pytest.raises(DataError, match="moderator"):
        converted(rows[4])


def test_text_parts_are_the_same_as_a_string(template: Template) -> None:
    """DS15"""
    rows = read(CASES / "DS15" / "parts.jsonl")
    plain, parts = (template.encode(converted(row)) for row in rows[:2])
    assert plain.input_ids.tolist() == parts.input_ids.tolist()
    assert plain.labels.tolist() == parts.labels.tolist()
    rendered = template.decode(parts.input_ids)
    assert [text for text in expected("DS15")["forbidden_in_render"] if text in rendered] == []
    with pytest.raises(DataError, match="image"):
        template.encode(converted(rows[2]))


def test_half_surrogate_pairs_are_refused_by_row() -> None:
    """DS17"""
    rows, refused = read_with_refusals(CASES / "DS17" / "surrogates.jsonl")
    assert [row["messages"][0]["content"] for row in rows] == [expected("DS17")["row_0_user"]]
    assert refused.keys() == {2, 3}
    assert all("surrogate" in reason for reason in refused.values())


def test_long_integers_keep_their_digits() -> None:
    """DS19"""
    assert [str(row["id"]) for row in read(CASES / "DS19" / "big_ints.jsonl")] == expected("DS19")["ids"]


@pytest.mark.slow
def test_a_string_column_of_more_than_2_gib_is_read(tmp_path: Path) -> None:
    """DS21: chunks are never merged, so nothing overflows 32-bit offsets. Written in parts, read with little memory."""
    chunk = pa.record_batch({"text": ["x" * (1 << 20)] * 64})
    batches = 33
    with (
        pa.OSFile(str(tmp_path / "big.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, chunk.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer,
    ):
        for _ in range(batches):
            writer.write_batch(chunk)
    before = pa.total_allocated_bytes()
    num_bytes = num_rows = 0
    for _, row in open_source(SourceConfig(name="case", uri=str(tmp_path / "big.arrow"))).rows():
        num_bytes += len(row["text"])
        num_rows += 1
        assert pa.total_allocated_bytes() - before < 8 * BATCH_BYTES + 2 * chunk.nbytes
    assert (num_rows, num_bytes) == (batches * 64, batches * 64 << 20)
    assert num_bytes > 2 << 30


def test_text_is_utf8_whatever_the_locale_and_other_encodings_are_named() -> None:
    """DS23"""
    code = (
        "import sys, json; from twinkle_core.config import SourceConfig; from twinkle_core.preprocessor.sources import open_source\n"
        "print(json.dumps([row for _, row in open_source(SourceConfig(name='s', uri=sys.argv[1])).rows()]))"
    )
    path = CASES / "DS23" / "utf8_cjk.jsonl"
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, cwd=ROOT, env=environment, check=True)
    assert json.loads(done.stdout) == read(path) == [json.loads(line) for line in path.read_bytes().split(b"\n") if line]
    for name in ("latin1.jsonl", "utf16.jsonl"):
        data = (CASES / "DS23" / name).read_bytes()
        with pytest.raises(UnicodeDecodeError) as first:
            data.decode()
        with pytest.raises(DataError, match=rf"{name}, line 1: not UTF-8: byte 0x.. at byte offset {first.value.start};"):
            read(CASES / "DS23" / name)


@pytest.mark.slow
def test_a_row_of_12_megabytes_is_read_and_then_falls_under_the_rule_for_length(tmp_path: Path, template: Template) -> None:
    """DS24"""
    made = subprocess.run([sys.executable, str(CASES / "DS24" / "gen.py")], capture_output=True, check=True).stdout
    (tmp_path / "long.jsonl").write_bytes(made)
    rows = read(tmp_path / "long.jsonl")
    assert len(rows) == expected("DS24")["rows"]
    assert len(rows[1]["messages"][0]["content"]) == 12_000_000
    dropping = Template(template.folder, TemplateConfig(max_length=64, truncation="delete"))
    outcomes = dropping.outcomes([converted(row) for row in rows])
    assert [outcome.dropped for outcome in outcomes] == [None, "too_long", None]


def test_every_setting_that_changes_ids_is_in_the_key(tmp_path: Path) -> None:
    """DS25"""
    trajectory = converted(read(CASES / "DS25" / "one.jsonl")[0])
    sources = [(CASES / "DS25" / f"template_{name}.jinja").read_text(encoding="utf-8") for name in "ab"]
    folder = train_tokenizer(tmp_path / "tokenizer", sources[0], ("<|bos|>", "</a>", "</b>"))

    class Base:
        name, digest, tokenizer_digest = "base", "d" * 64, "t" * 64

    base: Any = Base()
    trajectories = ArtifactRef(stage="preprocess", key="k", uri="", digest="p")
    settings: list[dict[str, Any]] = [
        {"chat_template": sources[0]}, {"chat_template": sources[1]}, {"chat_template": sources[0], "max_length": 99},
        {"chat_template": sources[0], "learn": "all"}]  # fmt: skip
    assert len({wanted_encoded(base, TemplateConfig(**setting), trajectories).key for setting in settings}) == len(settings)
    for name, source in zip("ab", sources, strict=True):
        template = Template(folder, TemplateConfig(chat_template=source))
        assert f"<{name}:user>ping</{name}>" in template.decode(template.encode(trajectory).input_ids)


@pytest.mark.slow
def test_names_with_brackets_stars_and_spaces_in_a_bucket_are_taken_literally(monkeypatch: pytest.MonkeyPatch) -> None:
    """OS04, OS07"""
    keys = [key for key in json.loads((CASES / "OS04" / "keys.json").read_text(encoding="utf-8")) if not key.endswith("/")]
    assert len(keys) == 4
    with s3_server() as environment:
        for variable, value in environment.items():  # AWS_ENDPOINT_URL among them: the only way to this server
            monkeypatch.setenv(variable, value)
        create_bucket(environment, "bucket")
        store = open_store("s3://bucket")
        for key in keys:
            folder = key.rpartition("/")[0]
            shards = {f"{folder}/shard-{number}.jsonl": json.dumps({"key": key, "n": number}).encode() for number in range(2)}
            for name, data in shards.items():
                store.put(name, data)
            store.put(f"{folder[:-1]}/other.jsonl", b'{"key": "another folder"}')
            assert [info.key for info in store.list(folder)] == list(shards)
            assert read_uri(f"s3://bucket/{folder}") == read_uri(f"s3://bucket/{folder}/") == [{"key": key, "n": 0}, {"key": key, "n": 1}]
            assert read_uri(f"s3://bucket/{folder}/shard-1.jsonl") == [{"key": key, "n": 1}]
        store.put("runs/trailing/a.jsonl", b'{"a": 1}')
        assert read_uri("s3://bucket/runs/trailing/") == [{"a": 1}]


def read_uri(uri: str) -> Rows:
    return [row for _, row in open_source(SourceConfig(name="case", uri=uri)).rows()]

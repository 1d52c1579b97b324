"""Measure one model on held-out rows: loss, token accuracy, and the answers it writes by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from storage.fingerprint import fingerprint
from twinkle_core.config import EvaluateConfig
from twinkle_core.errors import ConfigError, DataError
from twinkle_core.evaluator.generate import Answer, fits, generate
from twinkle_core.evaluator.held_out_loss import DocumentLoss, document_losses
from twinkle_core.evaluator.scorers import SCORERS, score
from twinkle_core.types import EncodedSample, Progress, Trajectory, user_data_get

SAMPLING_RULE = (
    "Held-out conversations that end with an assistant turn are sorted by the sha256 of their content within each source; "
    "one is taken from each source in turn, sources in order of name, until max_samples are chosen."
)
NO_SOURCE = "unnamed"
RenderPrompt = Callable[[Trajectory], Sequence[int]]


def evaluate_model(
    model_folder: Path,
    held_out: Sequence[Trajectory],
    encoded: Sequence[EncodedSample],
    config: EvaluateConfig,
    progress: Progress,
    *,
    sources: Sequence[str],
    render_prompt: RenderPrompt | None = None,
    batch_tokens: int = 1024,
    batch_size: int = 16,
) -> dict[str, Any]:
    """Plain JSON values: `numbers` (`all` and `by_source`, see `_numbers`), `samples`, `probes` and the `sampling_rule`.

    `sources[i]` names the source of `encoded[i]`. `render_prompt` turns a conversation into the ids of everything before
    its last assistant turn; pass the training template's, so that both models answer the same prompts; without it the folder's
    own chat template is used. The same model and rows give the same dict: no times, paths or dates are in it. `batch_tokens`
    and `batch_size` change memory and speed only. Computes in float32, on a GPU where there is one.

    Raises `DataError` for a wrong row (no supervised token, unknown scorer), `ConfigError` for a folder that is no whole model.
    """
    if len(sources) != len(encoded):
        raise DataError(f"{len(encoded)} encoded samples but {len(sources)} sources: name the source of each")
    chosen = choose_samples(held_out, config.max_samples)
    for trajectory in chosen:
        _check_scorer(trajectory)  # before a model is loaded and minutes are spent
    model, tokenizer = _load(model_folder)
    render = render_prompt or _own_template(tokenizer)
    progress.start("held-out loss", len(encoded), "documents")
    losses = document_losses(model, encoded, progress, batch_tokens=batch_tokens)
    probes: list[Trajectory] = [{"messages": [{"role": "user", "content": question}]} for question in config.probes]
    rendered = [(trajectory, list(render(trajectory))) for trajectory in chosen]
    fitting = [(trajectory, ids) for trajectory, ids in rendered if fits(model, ids, config.max_new_tokens)]
    chosen = [trajectory for trajectory, _ in fitting]
    left_out = f" Of these, {len(rendered) - len(chosen)} are longer than the model can read, and got no answer."
    prompts = [*(ids for _, ids in fitting), *(list(render(probe)) for probe in probes)]
    progress.start("answers", len(prompts), "prompts")
    answers = generate(model, tokenizer, prompts, progress, max_new_tokens=config.max_new_tokens, batch_size=batch_size)
    samples = [_sample(trajectory, answer) for trajectory, answer in zip(chosen, answers, strict=False)]
    names = sorted({*sources, *(source_of(trajectory) for trajectory in held_out)})
    return {
        "numbers": {
            "all": _numbers(losses, samples),
            "by_source": {
                name: _numbers(
                    [loss for loss, source in zip(losses, sources, strict=True) if source == name],
                    [sample for sample in samples if sample["source"] == name],
                )
                for name in names
            },
        },
        "samples": samples,
        "probes": [
            {"question": question, "answer": answer.text, "truncated": answer.truncated}
            for question, answer in zip(config.probes, answers[len(chosen) :], strict=True)
        ],
        "sampling_rule": SAMPLING_RULE + (left_out if len(chosen) < len(rendered) else ""),
    }


def choose_samples(held_out: Sequence[Trajectory], max_samples: int) -> list[Trajectory]:
    """The conversations that get a generated answer, by `SAMPLING_RULE`: whatever the order of `held_out`."""
    by_source: dict[str, list[tuple[str, int]]] = {}
    for index, trajectory in enumerate(held_out):
        if trajectory["messages"] and trajectory["messages"][-1]["role"] == "assistant":
            by_source.setdefault(source_of(trajectory), []).append((content_hash(trajectory), index))
    queues = [sorted(by_source[name]) for name in sorted(by_source)]
    turns = [(turn, place, index) for place, queue in enumerate(queues) for turn, (_, index) in enumerate(queue)]
    return [held_out[index] for _, _, index in sorted(turns)[:max_samples]]


def content_hash(trajectory: Trajectory) -> str:
    """sha256 hex of messages, tools and user data."""
    pairs = [[name, value] for name, value in trajectory.get("user_data", [])]
    return fingerprint({"messages": trajectory["messages"], "tools": trajectory.get("tools", []), "user_data": pairs})


def source_of(trajectory: Trajectory) -> str:
    return user_data_get(trajectory, "source") or NO_SOURCE


def _numbers(losses: Sequence[DocumentLoss], samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts, and means over tokens or answers; a mean over nothing is None."""
    loss_tokens = sum(loss.num_loss_tokens for loss in losses)
    scored = [sample for sample in samples if sample["correct"] is not None]
    correct = sum(sample["correct"] for sample in scored)
    return {
        "documents": len(losses),
        "loss_tokens": loss_tokens,
        "loss": sum(loss.loss_sum for loss in losses) / loss_tokens if loss_tokens else None,
        "token_accuracy": sum(loss.num_correct for loss in losses) / loss_tokens if loss_tokens else None,
        "answers": len(samples),
        "answers_scored": len(scored),
        "answers_correct": correct,
        "answer_accuracy": correct / len(scored) if scored else None,
    }


def _sample(trajectory: Trajectory, answer: Answer) -> dict[str, Any]:
    scorer, expected = user_data_get(trajectory, "scorer"), user_data_get(trajectory, "answer")
    return {
        "id": content_hash(trajectory)[:12],
        "source": source_of(trajectory),
        "prompt": [{"role": message["role"], "content": _text(message.get("content"))} for message in trajectory["messages"][:-1]],
        "reference": _text(trajectory["messages"][-1].get("content")),
        "answer": answer.text,
        "truncated": answer.truncated,
        "scorer": scorer,
        "expected": expected,
        "correct": None if scorer is None else score(scorer, answer.text, expected),
    }


def _check_scorer(trajectory: Trajectory) -> None:
    scorer = user_data_get(trajectory, "scorer")
    if scorer is None:
        return
    if scorer not in SCORERS:
        raise DataError(
            f"held-out row {content_hash(trajectory)[:12]} of source {source_of(trajectory)!r} has the unknown scorer {scorer!r}: "
            f"known are {', '.join(sorted(SCORERS))}"
        )
    score(scorer, "", user_data_get(trajectory, "answer"))


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))
    return ""


def _load(folder: Path) -> tuple[Any, Any]:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} has no config.json, so it is no model that loads by itself: export with form 'merged'")
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False, local_files_only=True)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer


def _own_template(tokenizer: Any) -> RenderPrompt:
    def render(trajectory: Trajectory) -> Sequence[int]:
        messages = trajectory["messages"]
        before = messages[:-1] if messages[-1]["role"] == "assistant" else messages
        encoding = tokenizer.apply_chat_template(before, tools=trajectory.get("tools"), add_generation_prompt=True, return_dict=True)
        return list(encoding["input_ids"])

    return render

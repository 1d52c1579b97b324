"""Model + passing report → a release that others can load."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from prefect import task
from prefect.states import State

from storage import layout
from storage.artifact import ArtifactRecord, ArtifactRef, SourceRef
from storage.store import open_store
from storage.uri import join
from tasks.artifacts import folder_of, lineage, read_json, record_of
from tasks.base_model import resolve
from tasks.console import stage_bar
from tasks.context import Context, to_json
from tasks.prefect_state import TASK_OPTIONS, ended, say_in_run
from tasks.report import data_numbers
from tasks.step import Produced, Stage, Wanted, run_step
from twinkle_core.config import ModelConfig, PublishConfig
from twinkle_core.errors import DamagedError, GateError
from twinkle_core.hub.publish import publish_folder, read_release, verify_release

STAGE = Stage(name="publish", version=1, modules=("twinkle_core.evaluator.card", "twinkle_core.hub.publish"))


def wanted_release(publish: PublishConfig, model: ArtifactRef, report: ArtifactRef) -> Wanted:
    """Another target is another release."""
    return Wanted(stage=STAGE, recipe=publish.recipe_dump(), inputs={"model": model, "report": report})


@task(name="publish", **TASK_OPTIONS)
def publish_task(
    context: Context, model: ModelConfig, publish: PublishConfig, exported: ArtifactRef, report: ArtifactRef
) -> State[ArtifactRef]:
    """The release. Raises `GateError` when the report does not allow it; the model stays in the store then."""
    base = resolve(context, model)
    wanted = wanted_release(publish, exported, report)
    target = target_of(context, publish.target)
    with stage_bar(STAGE.name) as progress:

        def compute(_key: str, work: Path) -> Produced:
            verdict = read_json(context, report, "report.json")["verdict"]
            if not verdict["passed"]:
                raise GateError(f"release '{publish.name}' is refused by its gate: {'; '.join(verdict['reasons'])}")
            folder = context.scratch / f"{work.name}-release"
            progress.start(STAGE.name, None, "files")
            try:
                shutil.copytree(folder_of(context, exported), folder, ignore=shutil.ignore_patterns("MANIFEST.json"))
                (folder / "README.md").write_text(_card(context, base.name, base.public_uri, publish, exported, report), encoding="utf-8")
                shutil.copyfile(folder_of(context, report) / "report.html", folder / "report.html")
                release = publish_folder(
                    folder,
                    target=target,
                    name=publish.name,
                    created=datetime.now(UTC),
                    artifacts={"model": exported, "report": report},
                    volatile=("report.html",),
                )
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            (work / "release.json").write_text(to_json({"name": release.name, "version": release.version}), encoding="utf-8")
            return Produced(summary={"headline": release.url, "name": release.name, "version": release.version})

        return ended(run_step(context, wanted, compute=compute, say=say_in_run(), check=partial(release_problems, context)))


def target_of(context: Context, target: str | None) -> str:
    """Where releases go: the target of the settings, else releases/ in the store, wherever the store lies now."""
    return target or join(context.store.url, layout.releases_prefix())


def release_problems(context: Context, record: ArtifactRecord) -> list[str]:
    """What is wrong with the release that a record of this stage speaks of: it may have been deleted or changed since."""
    store, name, version = open_store(target_of(context, record.recipe["target"])), record.summary["name"], record.summary["version"]
    try:
        release = read_release(store, name, version)
    except DamagedError as error:
        return [str(error)]
    if release is None:
        return [f"release {name} {version} is no longer at {store.url}"]
    return verify_release(store, release)


def outcome(context: Context, release: ArtifactRef, report: ArtifactRef) -> dict[str, str]:
    """What a run made and where it is, for the table at its end."""
    record = record_of(context, release)
    store, name = open_store(target_of(context, record.recipe["target"])), join(record.summary["name"], record.summary["version"])
    place = store.local_path(name) or join(store.url, name)
    return {"release": str(place), "report": str(folder_of(context, report) / "report.html")}


def _card(
    context: Context, base_name: str, base_uri: str | None, publish: PublishConfig, exported: ArtifactRef, report: ArtifactRef
) -> str:
    from twinkle_core.evaluator.card import render_card

    refs = record_of(context, report).inputs
    before, after, checkpoint = refs["before"], refs["after"], refs["checkpoint"]
    assert isinstance(before, ArtifactRef)
    assert isinstance(after, ArtifactRef)
    assert isinstance(checkpoint, ArtifactRef)
    train = record_of(context, checkpoint).recipe
    lora = train.get("lora") or {}
    made_from = list(lineage(context, exported))
    return render_card(
        name=publish.name,
        base_model=base_name,
        base_model_uri=base_uri,
        form="adapter" if record_of(context, exported).summary["form"] == "adapter" else "merged",
        datasets=[name.removeprefix("source ") for name, node in made_from if isinstance(node, SourceRef) and name.startswith("source ")],
        before=read_json(context, before, "evaluation.json"),
        after=read_json(context, after, "evaluation.json"),
        training={name: train[name] for name in ("epochs", "batch_size", "lr", "schedule", "seed")}
        | {f"lora {name}": lora[name] for name in ("rank", "alpha", "dropout") if name in lora}
        | {f"data {name}": number for name, number in data_numbers(context, checkpoint).items()},
        lineage={name: node.digest for name, node in made_from},
    )

"""What a run of a flow would do, without doing it: which stages are reused, which computed, and why."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from flows.params import PrepareParams, SFTParams
from storage.artifact import ArtifactRef
from tasks.base_model import resolve, weights_ref
from tasks.context import Context
from tasks.encode import wanted_encoded
from tasks.evaluate import HeldOut, wanted_evaluation
from tasks.export import wanted_model
from tasks.pack import wanted_plan
from tasks.preprocess import wanted_trajectories
from tasks.publish import release_problems, wanted_release
from tasks.report import wanted_report
from tasks.shard import wanted_shards
from tasks.step import Wanted, explain, sound_record
from tasks.train_sft import wanted_checkpoint


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One line of a plan."""

    stage: str
    key: str | None
    """None where it hangs on the content of something that is still to be computed."""
    reused: bool
    reason: str


class Planner:
    """Looks each wanted artifact up, and notes in `lines` what it found."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.lines: list[Planned] = []

    def look(self, label: str, wanted: Wanted) -> ArtifactRef | None:
        """The artifact if a run would reuse it; None, with the reason noted, if it would be computed."""
        check = partial(release_problems, self._context) if label == "publish" else (lambda _: [])
        record, damage = sound_record(self._context, wanted.stage.name, wanted.key, check)
        if record is None or damage:
            self.compute(label, "; ".join(damage) if damage else explain(self._context, wanted), wanted.key)
            return None
        self.lines.append(Planned(stage=label, key=wanted.key, reused=True, reason=f"made by run {record.provenance.get('run_id', '?')}"))
        return record.ref(self._context.store.url)

    def compute(self, label: str, reason: str, key: str | None = None) -> None:
        """Notes a stage that would be computed."""
        self.lines.append(Planned(stage=label, key=key, reused=False, reason=reason))


DATA_STAGES = ("preprocess", "encode", "pack", "shard")
TRAINING_STAGES = ("evaluate base", "train", "export", "evaluate", "report", "publish")


def plan(context: Context, p: PrepareParams) -> list[Planned]:
    """The stages in order. Nothing is computed, converted or written."""
    planner = Planner(context)
    base = resolve(context, p.model)
    look = planner.look
    trajectories = look("preprocess", wanted_trajectories(context, p.data))
    encoded = trajectories and look("encode", wanted_encoded(base, p.template, trajectories))
    packed = encoded and look("pack", wanted_plan(p.packing, encoded))
    shards = encoded and packed and look("shard", wanted_shards(p.shard, encoded, packed))
    if not isinstance(p, SFTParams):
        return _with_the_rest(planner, DATA_STAGES)
    data = trajectories and encoded and HeldOut(template=p.template, trajectories=trajectories, encoded=encoded)
    before = data and look("evaluate base", wanted_evaluation(base, weights_ref(base), p.evaluate, data))
    checkpoint = shards and look("train", wanted_checkpoint(base, p.train, shards))
    model = checkpoint and look("export", wanted_model(base, p.export, p.template, checkpoint))
    after = model and data and look("evaluate", wanted_evaluation(base, model, p.evaluate, data))
    report = before and after and checkpoint and look("report", wanted_report(p.publish, before, after, checkpoint))
    if model and report:
        look("publish", wanted_release(p.publish, model, report))
    return _with_the_rest(planner, DATA_STAGES + TRAINING_STAGES)


def _with_the_rest(planner: Planner, stages: tuple[str, ...]) -> list[Planned]:
    looked_at = {line.stage for line in planner.lines}
    for label in stages:
        if label not in looked_at:
            planner.compute(label, "an input of it is computed")
    return planner.lines

"""A flow run of the deployment, killed in training and retried from the command line, as Prefect, MLflow and the store show it.

The story is told once; each test asserts one law of it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from storage.artifact import list_records
from storage.store import open_store
from tasks.settings import Settings
from tasks.track import EXPERIMENT
from tests.architecture.sources import ROOT
from tests.end_to_end.conftest import in_home, run_flow, values
from twinkle_cli import processes, services
from twinkle_core.tracking.mlflow import client

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TWINKLE = [sys.executable, "-c", "from twinkle_cli.main import main; main()"]
STAGES_BEFORE_TRAINING = ["encode", "evaluate base", "pack", "preprocess", "shard"]


class Api:
    """Prefect's REST API, as much of it as is asked here."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=30, trust_env=False)

    def get(self, path: str) -> Any:
        return self._client.get(path).raise_for_status().json()

    def post(self, path: str, body: Any) -> httpx.Response:
        """The answer; 503 means that the server's SQLite was busy, and is asked again as Prefect's own client does."""
        for _ in range(20):
            answer = self._client.post(path, json=body)
            if answer.status_code != 503:
                break
            time.sleep(0.5)
        return answer

    def found(self, what: str, run_id: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.post(f"/{what}/filter", {"flow_runs": {"id": {"any_": [run_id]}}}).raise_for_status().json()
        return found


@dataclass(frozen=True, kw_only=True)
class Story:
    """What was seen at each turn."""

    api: Api
    run_id: str
    home: Path
    stages_done_at_kill: dict[str, str]
    """Stage → attempt that made it, of the records that stood when the run was killed."""
    newest_step_at_kill: int
    crashed: dict[str, Any]
    mlflow_at_kill: str
    """Status of the model's MLflow run after the kill."""
    reaped: str
    """What `twinkle reap` printed, before the retry."""
    mlflow_reaped: str
    ended: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Services of a home of its own, with the flow deployed."""

    settings: Settings
    api: Api

    def deployment(self) -> dict[str, Any]:
        found: dict[str, Any] = self.api.get("/deployments/name/sft/local")
        return found

    def create_run(self, params: dict[str, Any]) -> httpx.Response:
        body = {"parameters": {"params": params}, "state": {"type": "SCHEDULED"}}
        return self.api.post(f"/deployments/{self.deployment()['id']}/create_flow_run", body)

    def command(self, command: list[str]) -> str:
        """Runs a command in the environment of these settings; what it printed."""
        environment = {**os.environ, **self.settings.environment(), "PYTHONPATH": str(ROOT)}
        run = subprocess.run(command, env=environment, cwd=self.settings.home, capture_output=True, text=True, timeout=120, check=False)
        assert run.returncode == 0, run.stdout + run.stderr
        return run.stdout

    def mlflow_status(self) -> str:
        (run,) = self.mlflow_runs()
        return str(run.info.status)

    def mlflow_runs(self) -> list[Any]:
        assert self.settings.mlflow_uri is not None
        api = client(self.settings.mlflow_uri)
        found = api.get_experiment_by_name(EXPERIMENT)
        return [] if found is None else list(api.search_runs([found.experiment_id]))


@pytest.fixture(scope="module")
def scene(prefect_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    from flows.deploy import register

    home = tmp_path_factory.mktemp("services")
    given = Settings.from_env({"TWINKLE_HOME": str(home), "PREFECT_API_URL": prefect_server})
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PREFECT_WORKER_QUERY_SECONDS", "1")
            settings = services.up(given, timeout_seconds=120)
        assert services.running(settings).keys() == {"mlflow", "worker"}
        assert register() == ["sft/local", "prepare/local"]
        yield Scene(settings=settings, api=Api(prefect_server))
    finally:
        services.down(given)


@pytest.fixture(scope="module")
def long_settings(rows: Path, tiny_llama: Path) -> dict[str, Any]:
    """Enough steps to be caught in training."""
    return values(rows, tiny_llama, train__epochs=30, checkpoint__save_every=10, checkpoint__keep_last=3)


@pytest.fixture(scope="module")
def story(scene: Scene, long_settings: dict[str, Any]) -> Story:
    home, api = scene.settings.home, scene.api
    run_id = scene.create_run(long_settings).raise_for_status().json()["id"]
    newest_step = until("a checkpoint is committed", lambda: max(committed_steps(home), default=0), every=0.005)
    os.kill(flow_process(scene, run_id), signal.SIGKILL)
    done = {record.stage: record.attempt for record in list_records(open_store(scene.settings.store_url))}
    crashed = until("Prefect sees the death", lambda: ended_run(api, run_id))
    mlflow_at_kill = scene.mlflow_status()
    reaped = scene.command([*TWINKLE, "reap"])
    mlflow_reaped = scene.mlflow_status()
    scene.command([sys.executable, "-m", "prefect", "flow-run", "retry", run_id])
    ended = until("the retry ends", lambda: ended_run(api, run_id))
    return Story(
        api=api,
        run_id=run_id,
        home=home,
        stages_done_at_kill=done,
        newest_step_at_kill=newest_step,
        crashed=crashed,
        mlflow_at_kill=mlflow_at_kill,
        reaped=reaped,
        mlflow_reaped=mlflow_reaped,
        ended=ended,
    )


def until(what: str, look: Callable[[], Any], *, seconds: float = 120, every: float = 0.2) -> Any:
    """What `look` gives, once it gives something."""
    deadline = time.monotonic() + seconds
    while not (seen := look()):
        assert time.monotonic() < deadline, f"after {seconds:.0f} s it has not come to pass that {what}"
        time.sleep(every)
    return seen


def committed_steps(home: Path) -> list[int]:
    heads = [json.loads(path.read_bytes()) for path in home.glob("store/checkpoints/*/HEAD.json")]
    return [entry["step"] for head in heads for entry in head["checkpoints"]]


def ended_run(api: Api, run_id: str) -> dict[str, Any] | None:
    run: dict[str, Any] = api.get(f"/flow_runs/{run_id}")
    return run if run["state_type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED") else None


def flow_process(scene: Scene, run_id: str) -> int:
    """Pid of the flow run's process: the worker's descendant that was started for this run."""
    worker = services.running(scene.settings)["worker"].process
    assert worker is not None
    mark = f"PREFECT__FLOW_RUN_ID={run_id}".encode()
    found = [
        member.pid
        for member in processes.tree(worker.pid)
        if member.pid != worker.pid and mark in Path(f"/proc/{member.pid}/environ").read_bytes().split(b"\0")
    ]
    assert len(found) == 1, found
    return found[0]


def test_a_killed_flow_run_is_seen_as_crashed(story: Story) -> None:
    assert story.crashed["state"]["name"] == "Crashed"
    assert story.crashed["run_count"] == 1
    assert "train" not in story.stages_done_at_kill, "it was killed in training"
    assert story.newest_step_at_kill >= 10


def test_a_retry_completes_under_the_same_run_id(story: Story) -> None:
    assert story.ended["state"]["name"] == "Completed", story.ended["state"]
    assert story.ended["run_count"] == 2
    (record,) = list_records(open_store(str(story.home / "store")), "train")
    assert record.provenance["run_id"] == story.run_id
    assert len(list((story.home / "store" / "runs").iterdir())) == 1


def test_a_retry_reuses_the_finished_stages_and_computes_the_others(story: Story) -> None:
    second = [run for run in story.api.found("task_runs", story.run_id) if run["flow_run_run_count"] == 2]
    names = {run["name"].rsplit("-", 1)[0]: run["state"]["name"] for run in second}
    reused = [name for name, state in names.items() if state == "Reused"]
    assert sorted(reused) == STAGES_BEFORE_TRAINING
    assert {state for name, state in names.items() if name not in reused} == {"Completed"}
    assert len(names) == 10
    now = {record.stage: record.attempt for record in list_records(open_store(str(story.home / "store")))}
    for stage in ("preprocess", "encode", "pack", "shard"):
        assert now[stage] == story.stages_done_at_kill[stage]


def test_training_goes_on_from_its_last_checkpoint(story: Story, scene: Scene) -> None:
    (run,) = scene.mlflow_runs()
    resumed = int(run.data.tags["twinkle.resumed_after_steps"])
    assert resumed >= story.newest_step_at_kill
    assert resumed % 10 == 0
    body = {"logs": {"flow_run_id": {"any_": [story.run_id]}}, "limit": 200}
    lines = [line["message"] for line in story.api.post("/logs/filter", body).raise_for_status().json()]
    assert [line for line in lines if line.startswith(f"resuming after step {resumed} ")]


def test_mlflow_shows_one_finished_run_with_one_point_a_step(story: Story, scene: Scene) -> None:
    (run,) = scene.mlflow_runs()
    assert run.info.status == "FINISHED"
    store = open_store(str(story.home / "store"))
    (record,) = list_records(store, "train")
    num_steps = len(store.get(f"{record.prefix}/history.jsonl").splitlines())
    assert scene.settings.mlflow_uri is not None
    points = client(scene.settings.mlflow_uri).get_metric_history(run.info.run_id, "loss")
    assert sorted(point.step for point in points) == list(range(1, num_steps + 1))
    assert num_steps > story.newest_step_at_kill + 10


def test_a_dead_mlflow_run_says_running_until_it_is_reaped(story: Story) -> None:
    assert story.mlflow_at_kill == "RUNNING"
    assert story.reaped.startswith("ended 1 dead MLflow runs\n")
    assert story.mlflow_reaped == "KILLED"


def test_reaping_fills_in_the_curve_of_a_finished_training_and_then_finds_nothing(story: Story, scene: Scene) -> None:
    (run,) = scene.mlflow_runs()
    assert scene.settings.mlflow_uri is not None
    api = client(scene.settings.mlflow_uri)
    api.delete_run(run.info.run_id)  # as if MLflow had been away all the time
    printed = scene.command([*TWINKLE, "reap"])
    (again,) = scene.mlflow_runs()
    assert printed == f"ended 0 dead MLflow runs\ncompleted 1 curves of finished trainings\n  {again.info.run_id}\n"
    expected, filled = (sorted((p.step, p.value) for p in api.get_metric_history(r.info.run_id, "loss")) for r in (run, again))
    assert filled == expected
    assert again.info.status == "FINISHED"
    assert scene.command([*TWINKLE, "reap"]) == "ended 0 dead MLflow runs\ncompleted 0 curves of finished trainings\n"


def test_the_result_is_that_of_an_undisturbed_run(
    story: Story, finished: tuple[Path, dict[str, str]], long_settings: dict[str, Any], tmp_path: Path
) -> None:
    shutil.copytree(finished[0], tmp_path / "other")
    with in_home(tmp_path / "other"):
        release = Path(run_flow(long_settings)["release"])
    digests = {record.key: (record.stage, record.digest) for record in list_records(open_store(str(tmp_path / "other" / "store")))}
    mine = {record.key: (record.stage, record.digest) for record in list_records(open_store(str(story.home / "store")))}
    assert len(mine) == 10
    assert mine.items() <= digests.items()
    (theirs,) = (story.home / "store" / "releases" / "tiny").glob(f"*/{'model.safetensors'}")
    assert theirs.read_bytes() == (release / "model.safetensors").read_bytes()
    assert theirs.parent.name == release.name


def test_progress_is_shown_as_an_artifact_that_ends_at_a_hundred(story: Story) -> None:
    found = [item for item in story.api.found("artifacts", story.run_id) if item["key"] == "train-progress"]
    assert found
    assert {item["type"] for item in found} == {"progress"}
    assert max(item["data"] for item in found) == 100.0


def test_deploying_again_changes_nothing(scene: Scene) -> None:
    from flows.deploy import register

    clocks = ("updated", "last_polled", "status")
    schedule = [{"active": False, "schedule": {"cron": "0 3 * * *", "timezone": "UTC"}}]
    before = scene.deployment()
    scene.api.post(f"/deployments/{before['id']}/schedules", schedule).raise_for_status()
    before = {name: value for name, value in scene.deployment().items() if name not in clocks}
    assert before["schedules"]
    register()
    assert {name: value for name, value in scene.deployment().items() if name not in clocks} == before
    assert len(scene.api.post("/deployments/filter", {}).json()) == 2, "one for each flow"


def test_the_form_has_groups_descriptions_bounds_and_defaults(scene: Scene) -> None:
    schema = scene.deployment()["parameter_openapi_schema"]
    groups = schema["definitions"]["SFTParams"]["properties"]
    assert list(groups)[:2] == ["model", "data"]
    assert {"template", "packing", "shard", "train", "export", "evaluate", "publish", "checkpoint", "resources"} <= groups.keys()
    for name, group in groups.items():
        form = schema["definitions"][group["$ref"].rsplit("/", 1)[1]]
        assert group.get("description", form["description"]), name
        assert form["additionalProperties"] is False
        assert all(field["description"] for field in form["properties"].values()), name
    train = schema["definitions"]["TrainConfig"]["properties"]
    assert (train["epochs"]["minimum"], train["epochs"]["default"], train["epochs"]["type"]) == (1, 1, "integer")
    assert train["lr"]["exclusiveMinimum"] == 0
    assert train["schedule"]["enum"] == ["cosine", "linear", "constant"]
    assert scene.deployment()["parameters"]["params"]["publish"]["name"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"train__lrr": 1e-3}, "lrr"),
        ({"trian": {"lr": 1e-3}}, "trian"),
        ({"train__lr": "fast"}, "fast"),
        ({"train__epochs": 1.5}, "1.5"),
        ({"train__epochs": 0}, "minimum"),
        ({"train__schedule": "step"}, "step"),
    ],
)
def test_a_wrong_form_is_refused_by_the_server(scene: Scene, rows: Path, tiny_llama: Path, change: dict[str, Any], named: str) -> None:
    params = values(rows, tiny_llama) | change if "trian" in change else values(rows, tiny_llama, **change)
    before = len(scene.api.post("/flow_runs/filter", {}).json())
    answer = scene.create_run(params)
    assert 400 <= answer.status_code < 500
    assert named in answer.text
    assert len(scene.api.post("/flow_runs/filter", {}).json()) == before


def test_the_pages_in_the_browser_ask_the_server_they_came_from(prefect_server: str) -> None:
    shown = httpx.get(prefect_server.removesuffix("/api") + "/ui-settings").json()
    assert shown["api_url"] == prefect_server

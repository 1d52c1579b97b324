import threading
import time
from pathlib import Path
from typing import Any

import pytest

from twinkle_core.tracking import mlflow as tracking
from twinkle_core.tracking.mlflow import MlflowTracker, RunIdentity, client, find_run, log_outcome, reap
from twinkle_core.tracking.params import flatten

pytestmark = pytest.mark.slow
EXPERIMENT = "exp"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One database for the module: creating its tables takes seconds."""
    return tmp_path_factory.mktemp("mlflow")


@pytest.fixture
def identity(home: Path, request: pytest.FixtureRequest) -> RunIdentity:
    return RunIdentity(
        uri=f"sqlite:///{home}/mlflow.db",
        experiment=EXPERIMENT,
        artifact_location=(home / "artifacts").as_uri(),
        train_key=request.node.name,
        store_id="this store",
        name="model",
    )


def rows(first: int, last: int, at: float = 1000.0) -> list[dict[str, Any]]:
    return [{"step": s, "time": at + s, "loss": 1.0 / s, "lr": 0.1, "consumed_train_samples": 4 * s} for s in range(first, last + 1)]


def track(identity: RunIdentity, history: list[dict[str, Any]], new: list[dict[str, Any]], status: str = "FINISHED") -> MlflowTracker:
    tracker = MlflowTracker(identity, params={"train": {"lr": 1.0, "lora": None}}, tags={"twinkle.flow": "sft"}, warn=print)
    tracker.resume(history)
    for row in new:
        tracker.log(row)
    assert tracker.close(status)
    return tracker


def shown(identity: RunIdentity, name: str = "loss") -> list[tuple[int, float, int]]:
    api = client(identity.uri)
    run_id = find_run(api, EXPERIMENT, identity.train_key)
    return [(p.step, p.value, p.timestamp) for p in api.get_metric_history(run_id, name)]


def test_one_point_a_step_with_its_own_time(identity: RunIdentity) -> None:
    tracker = track(identity, [], rows(1, 5))
    assert shown(identity) == [(s, 1.0 / s, int((1000 + s) * 1000)) for s in range(1, 6)]
    run = client(identity.uri).get_run(tracker.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params == {"train.lr": "1.0", "train.lora": "null"}
    assert run.data.metrics["consumed_train_samples"] == 20


def test_replayed_steps_are_not_sent_again_and_the_run_is_the_same(identity: RunIdentity) -> None:
    first = track(identity, [], rows(1, 7), status="FAILED")
    second = track(identity, rows(1, 4), rows(5, 10, at=5000.0))
    assert second.run_id == first.run_id
    assert [step for step, _, _ in shown(identity)] == list(range(1, 11))
    assert shown(identity)[6] == (7, 1.0 / 7, 1007000), "the first time counts"
    run = client(identity.uri).get_run(second.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.tags["twinkle.resumed_after_steps"] == "4"


def test_what_a_kill_cut_off_is_filled_in_from_the_checkpoint(identity: RunIdentity) -> None:
    track(identity, [], rows(1, 2), status="FAILED")
    track(identity, rows(1, 6), rows(7, 8))
    assert [step for step, _, _ in shown(identity)] == list(range(1, 9))


def test_rows_wait_while_mlflow_is_away_and_none_is_lost(identity: RunIdentity, monkeypatch: pytest.MonkeyPatch) -> None:
    real, away = tracking.client, threading.Event()
    away.set()
    asked: list[int] = []

    def sometimes(uri: str) -> Any:
        if away.is_set():
            asked.append(1)
            raise ConnectionError("refused")
        return real(uri)

    monkeypatch.setattr(tracking, "client", sometimes)
    warnings: list[str] = []
    tracker = MlflowTracker(identity, params={}, tags={}, warn=warnings.append, retry_seconds=0.05)
    began = time.monotonic()
    for row in rows(1, 5):
        tracker.log(row)
    assert time.monotonic() - began < 0.5, "logging never waits"
    while len(asked) < 3:
        time.sleep(0.01)
    away.clear()
    assert tracker.close("FINISHED")
    assert [step for step, _, _ in shown(identity)] == [1, 2, 3, 4, 5]
    assert any("refused" in text for text in warnings)


def test_when_mlflow_stays_away_closing_says_so_and_raises_nothing(identity: RunIdentity, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(_uri: str) -> Any:
        raise ConnectionError("refused")

    monkeypatch.setattr(tracking, "client", never)
    warnings: list[str] = []
    tracker = MlflowTracker(identity, params={}, tags={}, warn=warnings.append, retry_seconds=0.05)
    tracker.log(rows(1, 1)[0])
    assert not tracker.close("FINISHED", timeout_seconds=0.5)
    assert "is kept in the checkpoint" in warnings[-1]


@pytest.fixture
def abandoned(identity: RunIdentity) -> str:
    track(identity, [], rows(1, 2))
    api = client(identity.uri)
    run_id = find_run(api, EXPERIMENT, identity.train_key)
    api.update_run(run_id, status="RUNNING")
    return run_id


def test_reap_ends_runs_that_nobody_trains_and_only_those(identity: RunIdentity, abandoned: str) -> None:
    api = client(identity.uri)
    assert reap(identity.uri, EXPERIMENT, "this store", alive=lambda key: key == identity.train_key) == []
    assert api.get_run(abandoned).info.status == "RUNNING"
    assert reap(identity.uri, EXPERIMENT, "this store", alive=lambda _: False) == [abandoned]
    assert api.get_run(abandoned).info.status == "KILLED"


def test_a_long_parameter_is_cut_and_stops_nothing(identity: RunIdentity) -> None:
    tracker = MlflowTracker(identity, params={"system": "x" * 7000, "short": "y"}, tags={}, warn=print)
    tracker.log(rows(1, 1)[0])
    assert tracker.close("FINISHED")
    params = client(identity.uri).get_run(tracker.run_id).data.params
    assert (len(params["system"]), params["system"][-1], params["short"]) == (6000, "…", "y")


def test_outcomes_are_added_to_a_run_that_has_ended(identity: RunIdentity, tmp_path: Path) -> None:
    tracker = track(identity, [], rows(1, 1))
    (tmp_path / "report.html").write_text("<html>")
    log_outcome(
        identity.uri,
        tracker.run_id,
        report_key="r1",
        metrics={"eval.loss": 0.5},
        documents={"recipe.json": "{}"},
        files={"report": tmp_path / "report.html"},
    )
    api = client(identity.uri)
    run = api.get_run(tracker.run_id)
    assert run.data.metrics["eval.loss"] == 0.5
    assert {item.path for item in api.list_artifacts(tracker.run_id)} == {"recipe.json", "report"}
    assert run.info.status == "FINISHED"


def test_nested_settings_become_dotted_names() -> None:
    assert flatten({"a": {"b": 1, "c": {"d": [2]}}, "e": None}) == {"a.b": 1, "a.c.d": [2], "e": None}


def test_an_outcome_is_added_once_and_a_new_report_again(identity: RunIdentity) -> None:
    tracker = track(identity, [], rows(1, 1))
    for report_key, loss in (("r1", 0.5), ("r1", 0.6), ("r2", 0.7)):
        log_outcome(identity.uri, tracker.run_id, report_key=report_key, metrics={"eval.loss": loss}, documents={}, files={})
    assert [point.value for point in client(identity.uri).get_metric_history(tracker.run_id, "eval.loss")] == [0.5, 0.7]


def test_reap_leaves_the_runs_of_another_store_alone(identity: RunIdentity, abandoned: str) -> None:
    assert reap(identity.uri, EXPERIMENT, "another store", alive=lambda _: False) == []
    assert client(identity.uri).get_run(abandoned).info.status == "RUNNING"
    assert abandoned in reap(identity.uri, EXPERIMENT, "this store", alive=lambda _: False)


def test_an_overtaken_attempt_sends_nothing_and_ends_no_run(identity: RunIdentity) -> None:
    current = [True]
    tracker = MlflowTracker(identity, params={}, tags={}, warn=print, retry_seconds=0.05)
    tracker.resume([], is_current=lambda: current[0])
    tracker.log(rows(1, 1)[0])
    deadline = time.monotonic() + 30
    while tracker.run_id is None or len(shown(identity)) < 1:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    current[0] = False
    for row in rows(2, 3):
        tracker.log(row)
    assert not tracker.close("FAILED")
    assert [step for step, _, _ in shown(identity)] == [1]
    assert client(identity.uri).get_run(tracker.run_id).info.status == "RUNNING", "it is the newer attempt's to end"


def test_the_next_attempt_of_the_same_process_goes_on_sending(identity: RunIdentity) -> None:
    tracker = MlflowTracker(identity, params={}, tags={}, warn=print, retry_seconds=0.05)
    tracker.resume([], is_current=lambda: False)
    tracker.log(rows(1, 1)[0])
    time.sleep(0.2)
    tracker.resume(rows(1, 1), is_current=lambda: True)
    for row in rows(2, 3):
        tracker.log(row)
    assert tracker.close("FINISHED")
    assert [step for step, _, _ in shown(identity)] == [1, 2, 3]


def test_mlflow_away_at_the_very_end_fails_no_training(identity: RunIdentity, monkeypatch: pytest.MonkeyPatch) -> None:
    real, warnings = tracking.client, []
    tracker = MlflowTracker(identity, params={}, tags={}, warn=warnings.append, retry_seconds=0.05)
    tracker.log(rows(1, 1)[0])
    while tracker.run_id is None or not shown(identity):
        time.sleep(0.05)

    def away(_uri: str) -> Any:
        raise ConnectionError("refused")

    monkeypatch.setattr(tracking, "client", away)
    assert not tracker.close("FINISHED")
    assert any("refused" in text for text in warnings)
    monkeypatch.setattr(tracking, "client", real)

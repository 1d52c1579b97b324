import json
import os
import socket
import sys
import threading
import urllib.request
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tasks.settings import Settings
from twinkle_cli import processes, services

FAKE = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write({body!r})
    def log_message(self, *a): pass
http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.from_env({"TWINKLE_HOME": str(tmp_path / "home")})


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch, settings: Settings):
    """Small programs in the place of Prefect and MLflow, which answer as those do."""
    bodies = {"prefect": b"true", "mlflow": b"OK"}
    monkeypatch.setattr(services, "_command", lambda _, name, port: [sys.executable, "-c", FAKE.format(body=bodies[name]), str(port)])
    yield
    services.down(settings)


BOTH = ("prefect", "mlflow")


@pytest.mark.usefixtures("fakes")
def test_up_twice_starts_once_and_down_twice_stops_once(settings: Settings) -> None:
    first = services.up(settings, BOTH)
    started = services.running(settings)
    assert started.keys() == set(BOTH)
    assert first.prefect_api_url == f"{started['prefect'].address}/api"
    assert services.up(settings, BOTH) == first
    assert services.running(settings) == started
    assert services.down(settings) == ["mlflow", "prefect"]
    assert services.running(settings) == {}
    assert services.down(settings) == []


@pytest.mark.usefixtures("fakes")
def test_ports_are_used_again_while_they_are_free(settings: Settings) -> None:
    first = services.up(settings, BOTH)
    services.down(settings)
    assert services.up(settings, BOTH) == first
    services.down(settings)
    port = int(str(first.mlflow_uri).rpartition(":")[2])
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
        other.listen()
        again = services.up(settings, BOTH)
    assert again.prefect_api_url == first.prefect_api_url
    assert again.mlflow_uri != first.mlflow_uri


@pytest.mark.usefixtures("fakes")
def test_a_process_that_took_over_a_remembered_number_is_left_alone(settings: Settings) -> None:
    services.up(settings, ("mlflow",))
    path = settings.home / "services.json"
    remembered = json.loads(path.read_text())
    remembered["mlflow"]["process"]["start_ticks"] -= 1
    path.write_text(json.dumps(remembered))
    assert services.down(settings) == []
    survivor = processes.identify(remembered["mlflow"]["process"]["pid"])
    assert survivor is not None
    processes.stop(survivor)


@pytest.mark.usefixtures("fakes")
def test_commands_at_the_same_time_start_one_server(settings: Settings) -> None:
    found: list[Settings] = []
    threads = [threading.Thread(target=lambda: found.append(services.up(settings, BOTH))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len({each.prefect_api_url for each in found}) == 1


def test_servers_that_the_user_named_are_used_and_none_is_started(settings: Settings) -> None:
    theirs = replace(settings, prefect_api_url="http://theirs/api", mlflow_uri="http://theirs")
    assert services.up(theirs, BOTH) == theirs
    assert services.running(settings) == {}


def test_a_service_that_ends_while_starting_is_named_with_the_end_of_its_log(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "_command", lambda *_: [sys.executable, "-c", "raise SystemExit('no such database')"])
    with pytest.raises(services.ServiceError, match="(?s)mlflow ended while starting.*no such database"):
        services.up(settings, ("mlflow",))
    assert services.running(settings) == {}


def test_a_service_that_does_not_answer_is_named(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "_command", lambda *_: [sys.executable, "-c", "import time; time.sleep(600)"])
    with pytest.raises(services.ServiceError, match="does not answer after 1 s"):
        services.up(settings, ("mlflow",), timeout_seconds=1)
    assert services.down(settings) == ["mlflow"]


def test_an_answer_from_somebody_else_on_the_port_is_no_health(settings: Settings) -> None:
    class Stranger(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"hello")

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Stranger) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        service = services.Service(name="mlflow", process=None, port=server.server_port, log="")
        assert urllib.request.urlopen(service.address).read() == b"hello"
        assert not services._healthy(service, settings)
        server.shutdown()


@pytest.mark.slow
def test_the_real_services_start_answer_and_stop_without_leaving_a_process(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_HOME")
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    before = {pid for pid, _ in processes._stats()}
    try:
        running = services.up(settings)
        members = {m for service in services.running(settings).values() if service.process for m in processes.tree(service.process.pid)}
        assert services.running(settings).keys() == {"prefect", "mlflow", "worker"}
        assert len(members) >= 3
        assert os.getpid() not in {member.pid for member in members}
        assert services.up(settings) == running
        assert (settings.home / "prefect").is_dir()
        assert (settings.home / "mlflow.db").is_file()
    finally:
        stopped = services.down(settings)
    assert stopped == ["worker", "mlflow", "prefect"]
    assert [member for member in members if member.alive()] == []
    left = {pid: (processes.PROC / str(pid) / "cmdline").read_bytes() for pid, _ in processes._stats() if pid not in before}
    assert [pid for pid, line in left.items() if str(settings.home).encode() in line] == []

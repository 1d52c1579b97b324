"""The local services: a Prefect server, an MLflow server and a process worker, on loopback, found again by later commands.

What was started is remembered in HOME/services.json with process and port; `down` stops exactly those.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tasks.settings import Settings, child_environment
from twinkle_cli import processes
from twinkle_cli.processes import ProcessId
from twinkle_core.errors import TwinkleError

HOST = "127.0.0.1"
POOL = "twinkle"
"""Prefect work pool that the worker serves."""
START_SECONDS = 120.0
"""A Prefect server takes 20 to 40 s for its first start on two cores."""


class ServiceError(TwinkleError, RuntimeError):
    """A local service did not start."""


@dataclass(frozen=True, kw_only=True)
class Service:
    """A service that was started, as HOME/services.json remembers it."""

    name: str
    process: ProcessId | None
    """None after `down`: the port is kept, so that addresses in a browser stay right."""
    port: int | None
    log: str

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.alive()

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.port}" if self.port else f"work pool '{POOL}'"


def up(settings: Settings, names: Sequence[str] = ("prefect", "mlflow", "worker"), timeout_seconds: float = START_SECONDS) -> Settings:
    """Settings in which `names` run and answer; those that run already stay, and a server given in `settings` is used as it is.

    Raises `ServiceError` with the end of the log of a service that ended or did not answer in time.
    """
    given = {"prefect": settings.prefect_api_url, "mlflow": settings.mlflow_uri}
    wanted = [name for name in ("prefect", "mlflow") if name in names and not given[name]]
    with _registry(settings) as services:
        for name in wanted:
            _start_unless_running(settings, services, name)
        for name in wanted:
            _wait(services[name], settings, timeout_seconds)
        settings = connect(settings, services)
        if "worker" in names:
            _start_unless_running(settings, services, "worker")
            _wait(services["worker"], settings, timeout_seconds)
    return settings


def down(settings: Settings) -> list[str]:
    """Stop what `up` started, the worker first; the names that were running."""
    stopped = []
    with _registry(settings) as services:
        for name in ("worker", "mlflow", "prefect"):
            service = services.get(name)
            if service is None:
                continue
            if service.process is not None and processes.stop(service.process):
                stopped.append(name)
            services[name] = replace(service, process=None)
    return stopped


def running(settings: Settings) -> dict[str, Service]:
    """The services of this home that are alive now, by name."""
    return {name: service for name, service in _read(settings).items() if service.running}


def connect(settings: Settings, services: dict[str, Service]) -> Settings:
    """`settings` with the addresses of those services that run, where the user gave none."""
    alive = {name: service for name, service in services.items() if service.running}
    if settings.prefect_api_url is None and "prefect" in alive:
        settings = replace(settings, prefect_api_url=f"{alive['prefect'].address}/api")
    if settings.mlflow_uri is None and "mlflow" in alive:
        settings = replace(settings, mlflow_uri=alive["mlflow"].address)
    return settings


def _start_unless_running(settings: Settings, services: dict[str, Service], name: str) -> None:
    known = services.get(name)
    if known is not None and known.running:
        return
    port = None if name == "worker" else _free_port(known.port if known else None)
    log = settings.home / "logs" / f"{name}.log"
    process = processes.start(_command(settings, name, port), _environment(settings, name, port), log, settings.home)
    services[name] = Service(name=name, process=process, port=port, log=str(log))
    _write(settings, services)  # at once: a killed `up` must leave nothing that `down` does not know


def _command(settings: Settings, name: str, port: int | None) -> list[str]:
    if name == "prefect":
        return [sys.executable, "-P", "-m", "prefect", "server", "start", "--host", HOST, "--port", str(port)]
    if name == "worker":
        return [sys.executable, "-P", "-m", "prefect", "worker", "start", "--pool", POOL, "--type", "process", "--name", POOL]
    # Clients write artifacts into the folder themselves: an experiment made without a server (tasks/track.py) has the same place.
    artifacts = ["--default-artifact-root", (settings.home / "mlflow-artifacts").as_uri(), "--no-serve-artifacts"]
    backend = ["--backend-store-uri", f"sqlite:///{settings.home / 'mlflow.db'}", *artifacts]
    return [sys.executable, "-P", "-m", "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1", *backend]


def _environment(settings: Settings, name: str, port: int | None) -> dict[str, str]:
    root = Path(__file__).parent.parent
    extra = {"PYTHONUNBUFFERED": "1"}
    if name == "prefect":  # a restarted server must find the leases of running flows, or it crashes them
        extra["PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE"] = "prefect.server.concurrency.lease_storage.filesystem"
        extra["PREFECT_HOME"] = str(settings.home / "prefect")
        extra["PREFECT_SERVER_UI_API_URL"] = f"http://{HOST}:{port}/api"  # else the pages in the browser ask port 4200
    if name == "mlflow":
        extra["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"
    environment = child_environment(settings, extra)
    if (root / "pyproject.toml").exists():  # run from a checkout: flow runs of the worker must find the packages too
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), environment.get("PYTHONPATH")]))
    return environment


def _wait(service: Service, settings: Settings, timeout_seconds: float) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not _healthy(service, settings):
        if not service.running:
            raise ServiceError(f"{service.name} ended while starting; its log {service.log} ends with:\n{_tail(service.log)}")
        if time.monotonic() > deadline:
            raise ServiceError(
                f"{service.name} at {service.address} does not answer after {timeout_seconds:.0f} s; "
                f"`twinkle down` stops it; its log {service.log} ends with:\n{_tail(service.log)}"
            )
        time.sleep(0.2)


def _healthy(service: Service, settings: Settings) -> bool:
    if service.name == "prefect":
        return _ask(f"{service.address}/api/health") == b"true"
    if service.name == "mlflow":
        return _ask(f"{service.address}/health") == b"OK"
    answer = _ask(f"{settings.prefect_api_url}/work_pools/{POOL}/workers/filter", b"{}")
    return any(worker["status"] == "ONLINE" for worker in json.loads(answer or b"[]"))


def _ask(url: str, body: bytes | None = None) -> bytes | None:
    """The answer's body, or None while nobody answers with success. Proxies are not for loopback."""
    request = urllib.request.Request(url, data=body, headers={"content-type": "application/json"})
    with contextlib.suppress(OSError):
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as response:
            return bytes(response.read())
    return None


def _free_port(preferred: int | None) -> int:
    for port in filter(None, [preferred]):
        with contextlib.suppress(OSError), _listen(port):
            return port
    with _listen(0) as listener:
        return int(listener.getsockname()[1])


def _listen(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the servers do: a port in TIME_WAIT is free for them
    listener.bind((HOST, port))
    return listener


@contextlib.contextmanager
def _registry(settings: Settings) -> Iterator[dict[str, Service]]:
    """The services under a lock between processes: two commands that start at once start one server. Written back at the end."""
    settings.home.mkdir(parents=True, exist_ok=True)
    with (settings.home / "services.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        services = _read(settings)
        try:
            yield services
        finally:
            _write(settings, services)


def _read(settings: Settings) -> dict[str, Service]:
    path = settings.home / "services.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return {
        name: Service(name=name, process=ProcessId(**item["process"]) if item["process"] else None, port=item["port"], log=item["log"])
        for name, item in found.items()
    }


def _write(settings: Settings, services: dict[str, Service]) -> None:
    path = settings.home / "services.json"
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps({name: asdict(service) for name, service in services.items()}, indent=1))
    draft.replace(path)


def _tail(log: str, num_lines: int = 15) -> str:
    return "\n".join(Path(log).read_text(errors="replace").splitlines()[-num_lines:])

"""Runs a flow in this process, and tells at the end what was made and where to look."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flows.params import FLOWS, SFTParams
from storage.errors import StorageError
from storage.store import open_store
from storage.uri import parse
from tasks.settings import Settings
from twinkle_core.config import validate
from twinkle_core.errors import ConfigError
from twinkle_core.hub.resolve import check_scheme
from twinkle_core.preprocessor.self_cognition import build_preprocessor
from twinkle_core.preprocessor.sources import open_source


def check(flow: str, values: Mapping[str, Any]) -> SFTParams:
    """The settings of `flow`, refused with `ConfigError` before anything heavy is imported or started."""
    params: SFTParams = validate(FLOWS[flow], values)
    for i, source in enumerate(params.data.sources):
        if "://" not in source.uri and not Path(source.uri).is_file():
            raise ConfigError(f"data.sources.{i}.uri is '{source.uri}', and there is no such file")
    try:
        parse(params.publish.target or ".")
    except StorageError as error:
        raise ConfigError(f"publish.target: {error}") from None
    model = params.model.source
    check_scheme(model)
    if "://" not in model and (model.startswith((".", "/", "~")) or model.endswith(".gguf")) and not Path(model).expanduser().exists():
        raise ConfigError(f"model.source is '{model}', and there is no such folder or file")
    for source in params.data.sources:  # last: a generator's own settings take a second to check
        open_source(source)
        build_preprocessor(source.processor, source.processor_args)
    return params


def dry_run(flow: str, params: SFTParams, settings: Settings) -> None:
    """Prints which stages a run would reuse and which it would compute, and why."""
    from flows.plan import plan_sft
    from tasks.context import Context, RunSpec

    context = Context(settings=settings, spec=RunSpec(run_id="dry-run", flow=flow, params=params.model_dump(mode="json"), code={}))
    open_store(settings.store_url)
    table = Table("stage", "key", "what", "why", box=None, header_style="bold")
    for line in plan_sft(context, params):
        table.add_row(line.stage, (line.key or "")[:12], "reuse" if line.reused else "compute", line.reason)
    Console().print(table)


def run(flow: str, params: SFTParams, settings: Settings) -> int:
    """Runs the flow against the Prefect server of `settings` (already in the environment); 0 when it completed."""
    from flows.sft import sft

    _only_bars_on_the_terminal()
    state = sft(params, return_state=True)
    if not state.is_completed():
        Console(stderr=True).print(f"{flow} ended as {state.name}: {state.message}", style="bold red", markup=False, highlight=False)
    outcome = state.result() if state.is_completed() else {}
    api = (settings.prefect_api_url or "").removesuffix("/api")
    outcome["Prefect"] = f"{api}/runs/flow-run/{state.state_details.flow_run_id}"
    outcome["MLflow"] = settings.mlflow_uri
    console = Console()
    for what, where in outcome.items():
        console.print(f"{what:<8} {where}", soft_wrap=True, highlight=False, markup=False)
    return 0 if state.is_completed() else 1


def _only_bars_on_the_terminal() -> None:
    """The run's log goes to the server; Prefect's own lines on the terminal would tear the progress bars."""
    from prefect.logging.handlers import PrefectConsoleHandler

    for handler in [handler for handler in logging.root.handlers if isinstance(handler, PrefectConsoleHandler)]:
        logging.root.removeHandler(handler)

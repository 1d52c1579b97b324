"""Where workers run: in this process (`local_group`), or as a gang of Ray actors (`ray_group`). `dispatch` and `batches` are pure."""

from twinkle_core.infra.group import WorkerGroup, open_group, resolve_group
from twinkle_core.infra.placement_drawing import get_device_placement
from twinkle_core.infra.remote import remote_class, remote_function
from twinkle_core.infra.runtime import Runtime, current_runtime, initialize

__all__ = [
    "Runtime",
    "WorkerGroup",
    "current_runtime",
    "get_device_placement",
    "initialize",
    "open_group",
    "remote_class",
    "remote_function",
    "resolve_group",
]

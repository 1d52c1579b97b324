"""Where workers run: in this process (`local_group`), or as a gang of Ray actors (`ray_group`). `dispatch` is pure."""

from twinkle_core.infra.group import WorkerGroup, open_group

__all__ = ["WorkerGroup", "open_group"]

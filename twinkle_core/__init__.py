"""Components for fine-tuning, usable by hand or through the flows. Importing this package imports nothing heavy.

import twinkle_core
from twinkle_core import DeviceGroup, DeviceMesh

twinkle_core.initialize(mode="local")
"""

from typing import TYPE_CHECKING, Any

from twinkle_core.device_mesh import DeviceGroup, DeviceMesh
from twinkle_core.logger import get_logger

if TYPE_CHECKING:
    from twinkle_core.infra import get_device_placement, initialize, remote_class, remote_function

__all__ = ["DeviceGroup", "DeviceMesh", "get_device_placement", "get_logger", "initialize", "remote_class", "remote_function"]


def __getattr__(name: str) -> Any:
    """What `infra` gives is imported when asked for: encoding's child processes start without it and without pydantic."""
    if name in __all__:
        from twinkle_core import infra

        return getattr(infra, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

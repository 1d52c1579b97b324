"""Components for fine-tuning, usable by hand or through the flows. Importing this package imports nothing heavy.

import twinkle_core
from twinkle_core import DeviceGroup, DeviceMesh

twinkle_core.initialize(mode="local")
"""

from twinkle_core.device_mesh import DeviceGroup, DeviceMesh
from twinkle_core.infra import get_device_placement, initialize, remote_class, remote_function
from twinkle_core.logger import get_logger

__all__ = ["DeviceGroup", "DeviceMesh", "get_device_placement", "get_logger", "initialize", "remote_class", "remote_function"]

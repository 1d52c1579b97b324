"""Which rank does which part of the work (`DeviceMesh`), and which devices a component runs on (`DeviceGroup`)."""

from twinkle_core.device_mesh.device_group import DeviceGroup, place_ranks
from twinkle_core.device_mesh.mesh import DeviceMesh

__all__ = ["DeviceGroup", "DeviceMesh", "place_ranks"]

"""Joining the torch process group that data-parallel workers reduce gradients in. Imports torch."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore  # their only home that type checkers know

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""A dead peer is seen by the group's owner within seconds; this is for what nobody else sees."""


def open_rendezvous(host: str, world_size: int) -> TCPStore:
    """The store of rank 0, on a free port of `host` that it holds from now on (`.port`): no other process can take it in between."""
    return TCPStore(host, 0, world_size, is_master=True, wait_for_workers=False, timeout=COLLECTIVE_TIMEOUT)


def find_rendezvous(host: str, port: int, world_size: int) -> TCPStore:
    """The store of the other ranks."""
    return TCPStore(host, port, world_size, is_master=False, timeout=COLLECTIVE_TIMEOUT)


def join(rank: int, world_size: int, *, store: Store | None = None, init_method: str | None = None) -> None:
    """Joins through `store` or `init_method` ('env://' under torchrun). NCCL where this process sees a GPU, else gloo."""
    if dist.is_initialized():
        return
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, init_method=init_method, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT)

"""The copy to host memory for which training stops when it is saved. Imports torch."""

from __future__ import annotations

from collections.abc import Mapping

import torch


class HostCopies:
    """Contiguous copies on the CPU, in memory that is kept from one save to the next.

    New memory is several times slower to fill than memory that was touched before, and a GPU copies to pinned memory without the CPU's
    help. A copy is valid until the next `take` under the same key.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], torch.Tensor] = {}

    @torch.no_grad()
    def take(self, key: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies of plain tensors, complete when this returns. What was kept under `key` and is not among them is let go."""
        names = set(tensors)
        for kept in [kept for kept in self._kept if kept[0] == key and kept[1] not in names]:
            del self._kept[kept]
        devices: set[torch.device] = set()
        for name, tensor in tensors.items():
            buffer = self._kept.get((key, name))
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self._kept[key, name] = buffer
            buffer.copy_(tensor.detach(), non_blocking=True)
            devices |= {tensor.device} if tensor.is_cuda else set()
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return {name: self._kept[key, name] for name in sorted(names)}

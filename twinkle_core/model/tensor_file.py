"""Writing safetensors files behind training (https://github.com/huggingface/safetensors#format). Imports torch.

The library's own writer copies every tensor into Python bytes and writes them while it holds the interpreter: training, in another
thread, stands still meanwhile. Here a file is written straight from the tensors' memory, and the interpreter is free during each write.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path

import torch

WRITE_BYTES = 8 << 20
"""Bytes handed to the system at a time."""
DTYPES = (
    ("U64", torch.uint64), ("I64", torch.int64), ("F64", torch.float64), ("F32", torch.float32), ("U32", torch.uint32),
    ("I32", torch.int32), ("BF16", torch.bfloat16), ("F16", torch.float16), ("U16", torch.uint16), ("I16", torch.int16),
    ("F8_E4M3", torch.float8_e4m3fn), ("F8_E5M2", torch.float8_e5m2), ("I8", torch.int8), ("U8", torch.uint8), ("BOOL", torch.bool),
)  # fmt: skip
"""Names in files, in the order in which the library lays tensors out: wide types first, so that all are aligned."""
NAMES = {dtype: name for name, dtype in DTYPES}
RANKS = {dtype: rank for rank, (_, dtype) in enumerate(DTYPES)}


def save_file(tensors: Mapping[str, torch.Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """The file that `safetensors.torch.save_file` writes, to the byte. `tensors` are contiguous, on the CPU, and no views of each other.

    Raises `OSError` naming the file where the disk does not take it.
    """
    for name, tensor in tensors.items():
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError(f"{name} is on {tensor.device}, contiguous: {tensor.is_contiguous()}; contiguous CPU tensors are written")
    order = sorted(tensors, key=lambda name: (RANKS[tensors[name].dtype], name))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    start = 0
    for name in order:
        tensor = tensors[name]
        end = start + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    try:
        with path.open("wb", buffering=0) as file:
            _write(file, memoryview(len(text).to_bytes(8, "little") + text))
            for name in order:
                _write(file, tensors[name].detach().reshape(-1).view(torch.uint8).numpy().data)
    except OSError as error:  # of a write, which names no file
        raise OSError(error.errno, error.strerror, str(path)) from error


def _write(file: io.RawIOBase, data: memoryview) -> None:
    while len(data):
        data = data[file.write(data[:WRITE_BYTES]) or 0 :]

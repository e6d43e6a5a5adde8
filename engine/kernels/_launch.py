"""How kernels are launched: what the device offers, and programmatic dependent launch.

Programmatic dependent launch (PDL, sm_90 and later): a kernel may be scheduled while the one before still runs. Every
kernel of this package then waits before its first read of anything a kernel has written, and writes only after the
wait; what it may read earlier are weights and the inputs of a step, which copies bring before its first kernel. A
kernel that waits has everything before it complete, so chains are safe.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


@dataclass
class LaunchOptions:
    """`pdl`: use PDL where the device has it. `capability`: choose for this (major, minor), not the device's."""

    pdl: bool = True
    capability: tuple[int, int] | None = None


options = LaunchOptions()


@contextmanager
def launch_options(**changes: Any) -> Iterator[LaunchOptions]:
    """Changes the options for the length of a `with` block."""
    before = {name: getattr(options, name) for name in changes}
    for name, value in changes.items():
        setattr(options, name, value)
    try:
        yield options
    finally:
        for name, value in before.items():
            setattr(options, name, value)


@lru_cache(maxsize=16)
def _device_capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@lru_cache(maxsize=16)
def _device_multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def capability(tensor: Tensor) -> tuple[int, int]:
    """Compute capability that kernels for this tensor are compiled for; (0, 0) in the interpreter."""
    if options.capability is not None:
        return options.capability
    return _device_capability(tensor.get_device()) if tensor.is_cuda else (0, 0)


def multiprocessors(tensor: Tensor) -> int:
    """Multiprocessors of the tensor's device; a few where there is none, so that loops over work items are tested."""
    return _device_multiprocessors(tensor.get_device()) if tensor.is_cuda else 3


@lru_cache(maxsize=16)
def _device_counters(device: torch.device) -> Tensor:
    return torch.zeros(1 << 16, dtype=torch.int32, device=device)


def arrival_counters(tensor: Tensor) -> Tensor:
    """65,536 int32 counters of the device, zero between launches; for kernels that run one after the other.

    One buffer a device, not a stream: the launch before a capture makes it, and a captured kernel finds it filled with
    zeros (zeros made during a capture would be written by one graph only).
    """
    return _device_counters(tensor.device)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """Launches a Triton kernel that takes a constexpr `PDL`, with PDL where the first tensor's device has it."""
    first = next(arg for arg in args if isinstance(arg, Tensor))
    pdl = options.pdl and capability(first) >= (9, 0)
    meta["PDL"] = pdl
    if pdl:
        meta["launch_pdl"] = True
    kernel[grid](*args, **meta)


def power_of_2(n: int) -> int:
    """The smallest power of two that is not below n (1 for n = 0)."""
    return 1 << max(n - 1, 0).bit_length()


def whole(y: Tensor) -> Tensor:
    """[T, N] as it is; Partials float32 [S, T, N] summed over S, in order."""
    if y.dim() == 2:
        return y
    total = y[0].clone()
    for part in y[1:]:
        total += part
    return total


def partials_of(y: Tensor) -> tuple[int, int, int]:
    """(splits, elements between two partial sums, elements between two rows) of [T, N] or Partials [S, T, N].

    Raises ValueError where the columns are not contiguous.
    """
    if y.stride(-1) != 1:
        raise ValueError(f"columns must be contiguous, the strides are {y.stride()}: call .contiguous() first")
    if y.dim() == 2:
        return 1, 0, y.stride(0)
    return y.shape[0], y.stride(0), y.stride(1)

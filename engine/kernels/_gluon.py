"""What Gluon names differently in Triton 3.6 (the old names) and 3.9 (the new ones)."""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma


def _either(module: object, new: str, old: str) -> object:
    return getattr(module, new) if hasattr(module, new) else getattr(module, old)


# barrier(): all threads of the program
barrier = _either(gl, "barrier", "thread_barrier")
# copy_async(shared, pointers, mask=None): by the threads; async_copy.wait_group waits
copy_async = _either(async_copy, "async_load", "async_copy_global_to_shared")
# copy_tile(descriptor, [row, column], barrier, shared): by the tensor memory accelerator; mbarrier.wait waits
copy_tile = _either(tma, "async_load", "async_copy_global_to_shared")

"""What a device's memory allocator says: bytes in use, and the most that were.

TensorFlow's BFC allocator counts chunks. It serves a request from the smallest free chunk that
is large enough, and hands out the whole chunk unless that is twice the request, or leaves 128 MiB
over. A chunk that some earlier computation left behind can so make a request of 132 MiB count as
256, and the same train step reads differently in two processes. A GPU takes its memory in one
region when it starts; a CPU takes regions as it needs them, of twice the size each time.

So before a measurement on a CPU all smaller free chunks are set aside (allocated, never touched,
so that no physical memory is used), and what is measured is cut from one large free chunk, as on
a GPU that has just started. Only the holes that the computation leaves in its own memory remain
in the figure: on the device they are as real as the tensors.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tensorflow as tf

from keras_ckpt import keras_internals

_LIMIT = "TF_CPU_BFC_MEM_LIMIT_IN_MB"
# What the CPU's allocator never exceeds unless told otherwise.
_DEFAULT_LIMIT = 2**36
# The region is virtual memory, of which what is used becomes real; the allocator's own table of it
# takes a 32nd of its size. A train step that needs more makes the allocator add larger regions.
_REGION, _LARGE_CHUNK = 2**32, 2**30
# Chunks smaller than this are not worth setting aside.
_SMALLEST_CHUNK = 2**12


@dataclass
class Measurement:
    """The memory in use over the course of a `with measuring()` block.

    Attributes:
        resting_bytes: in use before the block.
        peak_bytes: the most in use during the block, above `resting_bytes`; 0 until it ends.
        offset_bytes: what the allocator itself counts as in use before the block: resting memory
            and what was set aside.
    """

    resting_bytes: int
    peak_bytes: int = 0
    offset_bytes: int = 0


def default_device() -> str:
    """The device that Keras trains on: the first GPU, or else the CPU."""
    return "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"


def require_figures(device: str | None = None) -> None:
    """Checks that a device's allocator counts what is in use.

    Args:
        device: such as "GPU:0"; the device that Keras trains on if None.

    Raises:
        RuntimeError: if it does not, with what to set.
    """
    device = device or default_device()
    if not _counts(device):
        raise RuntimeError(
            f"The memory allocator of {device} does not count what is in use. On a CPU, set the "
            "environment variable TF_CPU_ALLOCATOR_USE_BFC=1 before TensorFlow is imported: "
            "`TF_CPU_ALLOCATOR_USE_BFC=1 python train.py`, or at the top of the program "
            '`import os; os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "1"`.'
        )


def bytes_in_use(device: str | None = None) -> int:
    """The bytes that a device's allocator has handed out.

    Raises:
        RuntimeError: if the allocator does not count them.
    """
    require_figures(device)
    return _info(device or default_device())["current"]


def available(device: str | None = None) -> int:
    """The bytes that a device can still hand out.

    On a CPU: what the operating system has to give, within TF_CPU_BFC_MEM_LIMIT_IN_MB if set.

    Raises:
        RuntimeError: if the allocator does not count what is in use.

    Example:

    >>> available() > 0
    True
    """
    device = device or default_device()
    in_use = bytes_in_use(device)
    if not device.startswith("CPU"):
        return keras_internals.device_memory_limit(device) - in_use
    limit = int(os.environ[_LIMIT]) * 2**20 if _LIMIT in os.environ else _DEFAULT_LIMIT
    return max(0, min(limit - in_use, _system_memory()))


@contextmanager
def measuring(device: str | None = None) -> Iterator[Measurement]:
    """Measures the most memory in use during the block.

    Args:
        device: such as "GPU:0"; the device that Keras trains on if None.

    Yields:
        a `Measurement`, complete when the block has ended.

    Raises:
        RuntimeError: if the allocator does not count what is in use.

    Example:

    >>> with measuring("CPU:0") as memory:
    ...     _ = tf.zeros([2**20, 4], tf.uint8)
    >>> memory.peak_bytes // 2**20
    4
    """
    device = device or default_device()
    measurement = Measurement(bytes_in_use(device))
    set_aside = _small_free_chunks(device)
    measurement.offset_bytes = _info(device)["current"]
    tf.config.experimental.reset_memory_stats(device)
    try:
        yield measurement
    finally:
        tf.test.experimental.sync_devices()
        measurement.peak_bytes = _info(device)["peak"] - measurement.offset_bytes
        set_aside.clear()


def _info(device: str) -> dict[str, int]:
    return tf.config.experimental.get_memory_info(device)


def _counts(device: str) -> bool:
    # An allocator that does not count says 0, or raises.
    block = _allocate(_SMALLEST_CHUNK, device)
    try:
        return _info(device)["current"] > 0
    except ValueError:
        return False
    finally:
        del block


def _small_free_chunks(device: str) -> list[tf.Tensor]:
    """Allocates every free chunk but one that is larger than any of them.

    On a GPU there is nothing to do, and under a limit of the user's there may be nothing to spare.
    """
    if not device.startswith("CPU") or _LIMIT in os.environ:
        return []
    try:
        _reserve_region(device)
        large_chunk = _address(_allocate(_LARGE_CHUNK, device))
    except tf.errors.ResourceExhaustedError:
        return []
    chunks: list[tf.Tensor] = []
    size = _LARGE_CHUNK
    while size > _SMALLEST_CHUNK:
        # The smallest free chunk that fits is taken: the large one, when no small one is left.
        chunks.append(_allocate(size // 2, device))
        if _address(chunks[-1]) == large_chunk:
            chunks.pop()
            size //= 2
    return chunks


@functools.cache
def _reserve_region(device: str) -> None:
    """Makes the allocator own a region, free but for now, that later measurements are cut from."""
    _allocate(_REGION, device)


def _system_memory() -> int:
    """The bytes that the operating system can give to a process."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(x.split()[1]) * 2**10 for x in lines if x.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _allocate(size: int, device: str) -> tf.Tensor:
    """A tensor that nothing has touched, of a multiple of `_SMALLEST_CHUNK` bytes."""
    shape = [size // _SMALLEST_CHUNK, _SMALLEST_CHUNK]  # One dimension would overflow.
    with tf.device(device):
        return tf.raw_ops.Empty(shape=shape, dtype=tf.uint8, init=False)


def _address(tensor: tf.Tensor) -> int:
    """Where a tensor's data begins."""
    capsule = tf.experimental.dlpack.to_dlpack(tensor)
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    data_of_dlpack = ctypes.cast(pointer(capsule, b"dltensor"), ctypes.POINTER(ctypes.c_void_p))
    return int(data_of_dlpack[0])

"""mmap without the copy of the descriptor that Python's own keeps (a forked child could not close that one)."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from typing import Any

PAGE = mmap.PAGESIZE

_FALLOC_KEEP_SIZE = 1
_FALLOC_PUNCH_HOLE = 2
MADV_POPULATE_WRITE = 23
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def map_shared(descriptor: int, num_bytes: int) -> Any:
    """The file's bytes as a buffer; unmapped when the last object that refers to the buffer is gone."""
    address = _libc.mmap(None, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    if address == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    buffer = (ctypes.c_ubyte * num_bytes).from_address(address)
    weakref.finalize(buffer, _libc.munmap, address, num_bytes).atexit = False
    return buffer


def part_of(buffer: Any, offset: int, num_bytes: int) -> Any:
    """A part of a mapping as an object of its own, whose end can be watched; keeps the mapping alive."""
    return (ctypes.c_ubyte * num_bytes).from_buffer(buffer, offset)


def populate(address: int, num_bytes: int) -> None:
    """Map pages now instead of one fault at a time later; a hint that older kernels do not know."""
    _libc.madvise(address, num_bytes, MADV_POPULATE_WRITE)


def commit(descriptor: int, offset: int, num_bytes: int) -> None:
    os.posix_fallocate(descriptor, offset, num_bytes)


def punch_hole(descriptor: int, offset: int, num_bytes: int) -> None:
    """Give whole pages back to the host; what is read there next is zero."""
    with contextlib.suppress(OSError):
        _libc.fallocate(descriptor, _FALLOC_PUNCH_HOLE | _FALLOC_KEEP_SIZE, offset, num_bytes)

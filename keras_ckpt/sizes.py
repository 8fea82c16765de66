"""Sizes in bytes, as people write and read them."""

from __future__ import annotations

import re

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def parse_bytes(size: int | str, name: str = "memory_limit") -> int:
    """A size as a number of bytes.

    Args:
        size: bytes as an int, or text such as "2GB" (10^9 bytes each) or "512MiB" (2^20 each).
        name: what the size is for, to be named in an error.

    Raises:
        ValueError: if it is text that is not a size, or not above zero.
        TypeError: if it is neither an int nor text.

    Example:

    >>> parse_bytes("1.5KiB")
    1536
    """
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise TypeError(
            f"`{name}` has to be bytes as an int, or text such as '2GB'; received {size!r}."
        )
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", size)
        if match is None or match[2].lower() not in _UNITS:
            raise ValueError(
                f"`{name}`={size!r} is not a size. Write bytes as an int, or a number with a unit: "
                "'2GB' (10^9 bytes each), '512MiB' (2^20 bytes each)."
            )
        size = int(float(match[1]) * _UNITS[match[2].lower()])
    if size <= 0:
        raise ValueError(f"`{name}` has to be above zero; received {size} bytes.")
    return size


def format_bytes(size: float) -> str:
    """A number of bytes for people, in units of 2^10.

    Example:

    >>> format_bytes(3 * 2**20)
    '3.0 MiB'
    """
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"

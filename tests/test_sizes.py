"""Sizes in bytes are read and written as people do."""

import pytest

from keras_ckpt.sizes import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("size", "expected"),
    [(7, 7), ("7", 7), ("2GB", 2 * 10**9), ("512MiB", 2**29), ("1.5 kib", 1536), (" 3 B ", 3)],
)
def test_sizes_are_read(size: int | str, expected: int) -> None:
    assert parse_bytes(size) == expected


@pytest.mark.parametrize("size", ["", "GB", "2 parrots", "-2GB", "1e9", 0, -1, "0MB"])
def test_what_is_no_size_is_refused(size: int | str) -> None:
    with pytest.raises(ValueError, match="limit"):
        parse_bytes(size, name="limit")


@pytest.mark.parametrize("size", [2.5, None, True])
def test_what_is_neither_int_nor_text_is_refused(size: object) -> None:
    with pytest.raises(TypeError, match="bytes as an int"):
        parse_bytes(size)  # type: ignore[arg-type]


def test_sizes_are_written() -> None:
    assert [format_bytes(x) for x in (5, 2048, 3 * 2**20, 5 * 2**30)] == [
        "5 B",
        "2.0 KiB",
        "3.0 MiB",
        "5.00 GiB",
    ]

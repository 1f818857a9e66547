"""Numbers and bytes as texts with suitable units, and texts in columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_PREFIXES = ("", "k", "M", "G", "T", "P")
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def readable_number(number: float, unit: str = "") -> str:
    """Returns a number to three digits, with a decimal prefix before its unit.

    >>> readable_number(999), readable_number(3.2e9), readable_number(3.21e9, "FLOP")
    ('999', '3.2 G', '3.21 GFLOP')
    """
    size, power = _scaled(number, 1000, len(_PREFIXES))
    return f"{size:.{'3g' if power else '0f'}} {_PREFIXES[power]}{unit}".rstrip()


def readable_bytes(size: float) -> str:
    """Returns a number of bytes, rounded to one decimal.

    >>> readable_bytes(1000), readable_bytes(1536), readable_bytes(3 * 2**30)
    ('1000 B', '1.5 KiB', '3.0 GiB')
    """
    scaled, power = _scaled(size, 1024, len(_BYTE_UNITS))
    return f"{scaled:.{'1f' if power else '0f'}} {_BYTE_UNITS[power]}"


def columns(lines: Sequence[Sequence[str]], right_aligned: Iterable[int]) -> list[str]:
    """Returns lines with cells aligned in columns.

    >>> columns([("Name", "Size"), ("kernel", "8"), ("bias", "16")], right_aligned=(1,))
    ['Name    Size', 'kernel     8', 'bias      16']
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.rjust(width) if column in right_aligned else cell.ljust(width)
                      for column, (cell, width) in enumerate(zip(line, widths, strict=True))).rstrip()
            for line in lines]


def _scaled(number: float, base: int, powers: int) -> tuple[float, int]:
    """Returns a number over the power of `base` that makes it less than `base`, and that power."""
    power = 0
    while round(number, 1) >= base and power < powers - 1:
        number, power = number / base, power + 1
    return number, power

"""Rows of a measurement as a text table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any


def text_table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """rows as aligned text. `columns` maps a row's key to its title; numbers stand right, text left."""
    cells = [list(columns.values())] + [[cell(row.get(key)) for key in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    numeric = [all(isinstance(row.get(key), int | float | None) for row in rows) for key in columns]
    sides = [str.rjust if right else str.ljust for right in numeric]
    lines = ["  ".join(side(text, w) for side, text, w in zip(sides, line, widths, strict=True)) for line in cells]
    return "\n".join(line.rstrip() for line in [lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def all_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Columns for `text_table`: every key whose values are single ones, under its own name without underscores."""
    keys = dict.fromkeys(key for row in rows for key, value in row.items() if not isinstance(value, list | dict))
    return {key: key.replace("_", " ") for key in keys}


def filled(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> dict[str, str]:
    """The columns in which at least one row has something."""
    return {key: title for key, title in columns.items() if any(row.get(key) is not None for row in rows)}


def with_range(row: Mapping[str, Any], column: str) -> str:
    """A figure, and in brackets its lowest and highest turn."""
    low, high = (row[f"{column}{end}"] for end in ("_min", "_max"))
    return cell(row[column]) + (f" ({cell(low)}-{cell(high)})" if low is not None else "")


def with_ranges(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row in which columns NAME_min and NAME_max stand in the cell of NAME."""
    spread = {key for key in row if {f"{key}_min", f"{key}_max"} <= set(row)}
    ends = {f"{key}{end}" for key in spread for end in ("_min", "_max")}
    return {key: with_range(row, key) if key in spread else value for key, value in row.items() if key not in ends}


def tables(rows: Sequence[Mapping[str, Any]]) -> str:
    """All rows, as one table for each run of rows that have the same columns."""
    rows = [with_ranges(row) for row in rows]
    groups = [list(group) for _, group in groupby(rows, key=lambda row: tuple(all_columns([row])))]
    return "\n\n".join(text_table(group, all_columns(group)) for group in groups)


def cell(value: Any) -> str:
    """A value as a reader wants it: three significant digits, yes and no, a dash for nothing."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)

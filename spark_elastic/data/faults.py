"""What is wrong with rows: found by tasks, put together by the driver into one error."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from spark_elastic.errors import DataError

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of trouble in one column.

    rows: how many rows have it. row: the first of them, counted in its partition. found, expected, remedy: for people.
    setting: the argument of `materialize` that the remedy changes. missing: the rows have null, NaN or infinity.
    """

    column: str
    rows: int
    row: int
    found: str
    expected: str
    remedy: str = ""
    partition: int = 0
    setting: str = ""
    missing: bool = False


class RowsRefused(Exception):
    """Raised by the encoder for a batch that cannot be stored."""

    def __init__(self, *faults: Fault) -> None:
        super().__init__(faults)
        self.faults = faults


def error_of(faults: Iterable[Fault], rows_seen: int) -> DataError:
    """One error for all of them. rows_seen: by all tasks, up to where each stopped."""
    first: dict[tuple[str, str], Fault] = {}
    counts: dict[tuple[str, str], int] = {}
    for fault in sorted(faults, key=lambda fault: (fault.partition, fault.row)):
        about = (fault.column, fault.expected)
        first.setdefault(about, fault)
        counts[about] = counts.get(about, 0) + fault.rows
    lines = []
    for about, fault in first.items():
        lines.append(
            f"column {fault.column!r}: {counts[about]:,} of {rows_seen:,} rows looked at hold {fault.found} (the first "
            f"is row {fault.row:,} of partition {fault.partition}); expected {fault.expected}"
            + (f". {fault.remedy}" if fault.remedy else "")
        )
    more = f"\n... and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    shown = next(iter(first.values()))
    return DataError(
        "\n".join(lines[:_SHOWN]) + more,
        column=shown.column,
        rows=counts[shown.column, shown.expected],
        found=shown.found,
        expected=shown.expected,
        settings=sorted({fault.setting for fault in first.values() if fault.setting}),
    )

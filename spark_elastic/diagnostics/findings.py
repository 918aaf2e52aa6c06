"""The result of the doctor: findings, each with its numbers and a remedy, and the report that holds them."""

from __future__ import annotations

import html
import json
from dataclasses import asdict, dataclass, field
from typing import Any

OK, WARNING, PROBLEM = "ok", "warning", "problem"
_MARKS = {OK: "ok", WARNING: "warning", PROBLEM: "PROBLEM"}
_COLOURS = {OK: "#2e7d32", WARNING: "#b26a00", PROBLEM: "#c62828"}


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        check: name of the check, such as "clocks".
        level: "ok", "warning" or "problem".
        says: what was found, with its numbers.
        fix: what to do, in one line; empty if nothing has to be done.
        facts: the numbers behind `says`, for programs.
    """

    check: str
    level: str
    says: str
    fix: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """The findings in the order in which they were made. Prints as text; a notebook shows it as a table."""

    findings: tuple[Finding, ...]
    took_s: float

    @property
    def ok(self) -> bool:
        """True if no finding is a problem; warnings do not count."""
        return not any(finding.level == PROBLEM for finding in self.findings)

    def of(self, check: str) -> list[Finding]:
        """Return the findings of one check."""
        return [finding for finding in self.findings if finding.check == check]

    @property
    def summary(self) -> str:
        problems, warnings = (sum(f.level == level for f in self.findings) for level in (PROBLEM, WARNING))
        if not problems and not warnings:
            return f"{len(self.findings)} findings, all well ({self.took_s:.1f} s)"
        counts = [counted(count, noun) for count, noun in ((problems, PROBLEM), (warnings, WARNING)) if count]
        return f"{' and '.join(counts)} among {len(self.findings)} findings ({self.took_s:.1f} s)"

    def to_json(self) -> str:
        report = {"ok": self.ok, "took_s": round(self.took_s, 3), "findings": [asdict(one) for one in self.findings]}
        return json.dumps(report, indent=2, default=str)

    def __str__(self) -> str:
        lines = []
        for finding in self.findings:
            lines.append(f"{_MARKS[finding.level]:>7}  {finding.check}: {finding.says}")
            if finding.fix:
                lines.append(f"{'':7}  → {finding.fix}")
        return "\n".join([*lines, "", self.summary])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = "".join(_html_row(finding) for finding in self.findings)
        return f"<table><tbody>{rows}</tbody></table><p>{html.escape(self.summary)}</p>"


def _html_row(finding: Finding) -> str:
    says = html.escape(finding.says) + (f"<br><b>→ {html.escape(finding.fix)}</b>" if finding.fix else "")
    cells = [
        f'<td style="color:{_COLOURS[finding.level]}"><b>{finding.level}</b></td>',
        f"<td>{html.escape(finding.check)}</td>",
        f'<td style="text-align:left">{says}</td>',
    ]
    return f"<tr>{''.join(cells)}</tr>"


def counted(count: int, noun: str) -> str:
    """Return the count with its noun, such as "1 executor" or "2 executors"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def first_of(names: list[str], most: int = 3) -> str:
    """Join the first names; " and 2 more" stands for the rest."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")

"""What a checkup comes to: findings, each with its numbers and what to do, and their report."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

OK, WARNING, PROBLEM = "ok", "warning", "problem"
_MARKS = {OK: "ok", WARNING: "warning", PROBLEM: "PROBLEM"}
_COLOURS = {OK: "#2e7d32", WARNING: "#b26a00", PROBLEM: "#c62828"}


@dataclass(frozen=True)
class Finding:
    """check: what was looked at. level: "ok", "warning" or "problem". says: what was found, with its numbers.
    fix: what to do, in a line; empty if there is nothing to do. facts: the same for programs."""

    check: str
    level: str
    says: str
    fix: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """The findings of a checkup, in the order in which they were made; shown as text, and as a table in a notebook."""

    findings: tuple[Finding, ...]
    took_s: float

    @property
    def ok(self) -> bool:
        """Whether there is no problem; warnings may be there."""
        return not any(finding.level == PROBLEM for finding in self.findings)

    def of(self, check: str) -> list[Finding]:
        """The findings of one check."""
        return [finding for finding in self.findings if finding.check == check]

    @property
    def summary(self) -> str:
        problems, warnings = (sum(f.level == level for f in self.findings) for level in (PROBLEM, WARNING))
        if not problems and not warnings:
            return f"{len(self.findings)} findings, all well ({self.took_s:.1f} s)"
        said = [counted(count, noun) for count, noun in ((problems, PROBLEM), (warnings, WARNING)) if count]
        return f"{' and '.join(said)} among {len(self.findings)} findings ({self.took_s:.1f} s)"

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
        rows = "".join(_row(finding) for finding in self.findings)
        return f"<table><tbody>{rows}</tbody></table><p>{html.escape(self.summary)}</p>"


def worst(levels: Sequence[str]) -> str:
    return max(levels, key=[OK, WARNING, PROBLEM].index, default=OK)


def _row(finding: Finding) -> str:
    says = html.escape(finding.says) + (f"<br><b>→ {html.escape(finding.fix)}</b>" if finding.fix else "")
    cells = [
        f'<td style="color:{_COLOURS[finding.level]}"><b>{finding.level}</b></td>',
        f"<td>{html.escape(finding.check)}</td>",
        f'<td style="text-align:left">{says}</td>',
    ]
    return f"<tr>{''.join(cells)}</tr>"


def counted(count: int, noun: str) -> str:
    """ "1 executor", "2 executors"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"

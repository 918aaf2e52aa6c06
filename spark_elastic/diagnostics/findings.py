"""What the doctor finds: `Finding` and `Report`."""

from __future__ import annotations

import html
import json
from dataclasses import asdict, dataclass, field
from typing import Any

from spark_elastic.membership.reasons import counted
from spark_elastic.redaction import redacted

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

    def __post_init__(self) -> None:
        object.__setattr__(self, "says", redacted(self.says))  # an error of a storage may name its address


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
        counts = [(sum(f.level == level for f in self.findings), level) for level in (PROBLEM, WARNING)]
        named = [counted(count, level) for count, level in counts if count]
        if not named:
            return f"{len(self.findings)} findings, all well ({self.took_s:.1f} s)"
        return f"{' and '.join(named)} among {len(self.findings)} findings ({self.took_s:.1f} s)"

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
        rows = []
        for finding in self.findings:
            fix = f"<br><b>→ {html.escape(finding.fix)}</b>" if finding.fix else ""
            rows.append(
                f'<tr><td style="color:{_COLOURS[finding.level]}"><b>{finding.level}</b></td>'
                f"<td>{html.escape(finding.check)}</td>"
                f'<td style="text-align:left">{html.escape(finding.says)}{fix}</td></tr>'
            )
        return f"<table><tbody>{''.join(rows)}</tbody></table><p>{html.escape(self.summary)}</p>"

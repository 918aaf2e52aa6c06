"""A strict reader of Prometheus's text format, version 0.0.4, for the tests."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\[\\"n])*)"'
SAMPLE = re.compile(rf"({NAME})(?:\{{({LABEL}(?:,{LABEL})*)\}})? (\S+)")
ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


@dataclass
class Family:
    """A metric: its type and the value of each combination of labels."""

    kind: str
    about: str
    samples: dict[frozenset[tuple[str, str]], float] = field(default_factory=dict)


def read(text: str) -> dict[str, Family]:
    """Return the metrics by name. Raises AssertionError for whatever the format does not allow."""
    assert text.endswith("\n")
    text.encode("utf-8")
    found: dict[str, Family] = {}
    about = current = ""
    for line in text[:-1].split("\n"):
        if line.startswith("# HELP "):
            _, _, current, about = line.split(" ", 3)
            assert re.fullmatch(NAME, current)
            assert current not in found, f"{current} is not in one piece"
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name == current
            assert kind in ("gauge", "counter")
            assert kind != "counter" or name.endswith("_total")
            found[name] = Family(kind, about)
        else:
            match = SAMPLE.fullmatch(line)
            assert match, line
            assert match[1] == current, "a sample under another metric's TYPE"
            labels = [(name, re.sub(r'\\[\\"n]', lambda m: ESCAPES[m[0]], value)) for name, value in _labels(match[2])]
            key = frozenset(labels)
            assert len({name for name, _ in labels}) == len(labels), "a label twice"
            assert key not in found[current].samples, f"{line} twice"
            found[current].samples[key] = float(match[7])
    return found


def _labels(text: str | None) -> list[tuple[str, str]]:
    return re.findall(LABEL, text or "")

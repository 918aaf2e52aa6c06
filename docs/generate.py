"""Writes the generated parts of `protocol.md` anew from the code: `python docs/generate.py` from the repository root.

A generated part stands between `<!-- generated: name -->` and `<!-- end -->`. A test compares them with the code.
"""

from __future__ import annotations

import ast
import enum
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from spark_elastic.core import commands, events
from spark_elastic.core.states import PHASES, WORKERS, Table
from spark_elastic.wire import messages

PAGE = Path(__file__).parent / "protocol.md"
_PART = re.compile(r"(<!-- generated: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def diagram(table: Table[Any]) -> str:
    """The table as a mermaid state diagram. What leads to the same state for one reason is one arrow."""
    lines = ["```mermaid", "stateDiagram-v2"]
    states = list(table.meaning)
    lines.append(f"    [*] --> {states[0].value}")
    for (before, after), why in table.transitions.items():
        lines.append(f"    {before.value} --> {after.value}: {why.replace(':', ',').replace('`', '')}")
    lines += [f"    {state.value} --> [*]" for state in states if not table.leaving(state)]
    return "\n".join([*lines, "```", ""])


def states(table: Table[Any]) -> str:
    rows = [f"| {state.name} | {meaning} |" for state, meaning in table.meaning.items()]
    return "\n".join(["| state | meaning |", "|---|---|", *rows, ""])


def transitions(table: Table[Any]) -> str:
    rows = [f"| {before.name} | {after.name} | {why} |" for (before, after), why in table.transitions.items()]
    return "\n".join(["| from | to | when |", "|---|---|---|", *rows, ""])


def message_tables() -> str:
    """Every message with its fields, under the direction that the source gives it."""
    source = inspect.getsource(messages)
    headings = [(source[: m.start()].count("\n"), m[1]) for m in re.finditer(r"^# --- (.*?) -+$", source, re.MULTILINE)]
    lines: list[str] = []
    current = ""
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        heading = [title for line, title in headings if line < node.lineno][-1]
        if heading != current:
            current = heading
            lines += ["", f"**{heading.replace('->', '→')}**", "", "| message | fields | |", "|---|---|---|"]
        lines.append(_row(node))
    return "\n".join([*lines[1:], ""])


def _row(node: ast.ClassDef) -> str:
    fields = ", ".join(ast.unparse(item.target) for item in node.body if isinstance(item, ast.AnnAssign))
    return f"| `{node.name}` | {fields} | {_first_paragraph(ast.get_docstring(node) or '')} |"


def dataclass_table(module: ModuleType, name: str) -> str:
    rows = [_row(node) for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.ClassDef)]
    return "\n".join([f"| {name} | fields | |", "|---|---|---|", *rows, ""])


def _first_paragraph(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split())


class Part(enum.Enum):
    """The generated parts, by their name in the page."""

    phase_diagram = "phase_diagram"
    phase_states = "phase_states"
    phase_transitions = "phase_transitions"
    worker_diagram = "worker_diagram"
    worker_states = "worker_states"
    worker_transitions = "worker_transitions"
    messages = "messages"
    events = "events"
    commands = "commands"

    def text(self) -> str:
        match self:
            case Part.phase_diagram:
                return diagram(PHASES)
            case Part.phase_states:
                return states(PHASES)
            case Part.phase_transitions:
                return transitions(PHASES)
            case Part.worker_diagram:
                return diagram(WORKERS)
            case Part.worker_states:
                return states(WORKERS)
            case Part.worker_transitions:
                return transitions(WORKERS)
            case Part.messages:
                return message_tables()
            case Part.events:
                return dataclass_table(events, "event")
            case Part.commands:
                return dataclass_table(commands, "command")


def generated(page: str) -> str:
    """The page with its generated parts as the code has them now."""
    return _PART.sub(lambda match: f"{match[1]}{Part(match[2]).text()}{match[4]}", page)


if __name__ == "__main__":
    PAGE.write_text(generated(PAGE.read_text()))

"""Imports point down only: each part of the package knows the ones below it, and siblings do not know one another."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "spark_elastic"

FLOORS: tuple[str, ...] = (
    "redaction",
    "helper_thread",
    "errors",
    "clock",
    "settings",
    "data.order",
    "membership",
    "wire",
    "reporting",
    "spark",
    "data",
    "runs",
    "collective",
    "elastic",
    "exact",
    "torch",
    "tensorflow",
    "keras",
    "tensorflow.keras",
    "tensorflow.elastic",
    "driver",
    "task",
    "jobs",
    "trackers",
    "ml",
    "diagnostics",
    "cli",
    "__main__",
    "__init__",
)
"""Every folder and single module of the package, lowest first: each may import only those before it."""

SIBLINGS = ({"driver", "task"}, {"torch", "tensorflow"}, {"data", "collective"}, {"spark", "collective"})
"""Parts that must not know each other in either direction."""
PURE = {"membership", "data.order"}
PURE_MAY_IMPORT = {"errors", "settings", *PURE}
PURE_THIRD_PARTY = {"numpy"}
NOT_IN_PURE = {"threading", "socket", "time", "logging", "asyncio", "subprocess", "multiprocessing", "selectors", "os"}


def imports_of(source: str) -> set[str]:
    """Dotted names of all modules that a source imports, wherever in it. `from a import b` gives "a" and "a.b"."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the floor"
            found.add(str(node.module))
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
            found |= {str(each.value) for each in node.args if isinstance(each, ast.Constant)}
    return found


def part_of(module: str) -> str | None:
    """The first name below the package; None for other packages, and for the package itself."""
    head, _, rest = module.partition(".")
    if head != PACKAGE:
        return None
    names = rest.split(".")
    return next((part for part in (".".join(names[:2]), names[0]) if part in FLOORS), None)


def violations(part: str, imported: set[str]) -> list[str]:
    """What a module of `part` must not import."""
    wrong: list[str] = []
    for module in sorted(imported):
        target = part_of(module)
        siblings = target != part and any({part, target} <= each for each in SIBLINGS)
        if siblings:
            wrong.append(f"{module} is a sibling")
        elif target is not None and FLOORS.index(target) > FLOORS.index(part):
            wrong.append(f"{module} is on a higher floor")
        if part in PURE:
            top = module.partition(".")[0]
            if target is not None and target not in PURE_MAY_IMPORT:
                wrong.append(f"{module} is not for pure code")
            if top != PACKAGE and top not in PURE_THIRD_PARTY and top not in sys.stdlib_module_names:
                wrong.append(f"{module} is not the standard library")
            if top in NOT_IN_PURE:
                wrong.append(f"{module} has no place in pure code")
    return wrong


SOURCES = sorted((ROOT / PACKAGE).rglob("*.py"))


def part_at(path: Path) -> str:
    names = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
    return part_of(".".join((PACKAGE, *names))) or names[0]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    part = part_at(path)
    assert part in FLOORS, f"{part} has no floor yet"
    assert violations(part, imports_of(path.read_text())) == []


def test_a_driver_module_may_not_know_a_task_module() -> None:
    assert violations("driver", {"spark_elastic.task.agent"}) == ["spark_elastic.task.agent is a sibling"]


def test_membership_may_not_read_a_clock() -> None:
    assert violations("membership", {"time"}) == ["time has no place in pure code"]
    assert violations("membership", {"spark_elastic.clock"}) == ["spark_elastic.clock is not for pure code"]

"""Imports point down only: each floor of the package knows the ones below it, and siblings do not know one another."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "spark_elastic"

FLOORS: dict[str, int] = {
    "errors": 0,
    "settings": 0,
    "clock": 0,
    "core": 1,
    "wire": 2,
    "state": 2,
    "display": 2,
    "loops": 2,
    "worker_link": 2,
    "data": 2,
    "collective": 2,
    "driver": 3,
    "task": 3,
    "torch": 3,
    "tensorflow": 3,
    "keras": 4,
    "tensorflow.keras": 4,
    "tensorflow.elastic": 4,
    "ml": 5,
    "backends": 5,
    "drawing": 5,
    "picture": 5,
    "job": 5,
    "runner": 5,
    "checkup": 5,
    "cli": 5,
    "__main__": 5,
    "__init__": 5,
}
"""First name or names below the package -> its floor. A new one has to be given a floor here."""

SIBLINGS = {"driver", "task", "torch", "tensorflow"}
CORE_MAY_IMPORT = {"core", "errors", "settings"}
CORE_THIRD_PARTY = {"numpy"}
NOT_IN_CORE = {"threading", "socket", "time", "logging", "asyncio", "subprocess", "multiprocessing", "selectors", "os"}


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
        if target is not None and FLOORS[target] > FLOORS[part]:
            wrong.append(f"{module} is on a higher floor")
        if target is not None and target != part and {part, target} <= SIBLINGS:
            wrong.append(f"{module} is a sibling")
        if part == "core":
            top = module.partition(".")[0]
            if target is not None and target not in CORE_MAY_IMPORT:
                wrong.append(f"{module} is not for the core")
            if top != PACKAGE and top not in CORE_THIRD_PARTY and top not in sys.stdlib_module_names:
                wrong.append(f"{module} is not the standard library")
            if top in NOT_IN_CORE:
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


def test_the_core_may_not_read_a_clock() -> None:
    assert violations("core", {"time"}) == ["time has no place in pure code"]
    assert violations("core", {"spark_elastic.clock"}) == ["spark_elastic.clock is not for the core"]


def test_the_core_may_not_import_a_framework() -> None:
    assert violations("core", {"torch"}) == ["torch is not the standard library"]


def test_a_lower_floor_may_not_know_a_higher_one() -> None:
    assert violations("wire", {"spark_elastic.runner"}) == ["spark_elastic.runner is on a higher floor"]


def test_imports_inside_of_functions_count_too() -> None:
    assert imports_of("def f():\n    from spark_elastic.task import agent") == {
        "spark_elastic.task",
        "spark_elastic.task.agent",
    }

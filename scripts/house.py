"""Print how the package is cut into modules: their number and size, import circles, names of two classes.

    python scripts/house.py

`tests/unit/test_house.py` holds what must stay at zero.
"""

from __future__ import annotations

import ast
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "spark_elastic"
SMALL, SCRAP = 50, 110
"""Lines below which a module is small, and below which one with a single importer belongs to that importer."""


def modules() -> dict[str, Path]:
    """Return the file of each module of the package, by dotted name."""
    found = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        names = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(names[:-1] if names[-1] == "__init__" else names)] = path
    return found


def imports_of(path: Path, known: Mapping[str, Path]) -> set[str]:
    """Return the modules that a file imports, also within functions; not those for type checkers alone."""
    found = set()
    for node in _executed(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                found.add(module if module in known else str(node.module))
    return found & known.keys()


def _executed(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from _executed(node)


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the sets of modules that import one another, directly or through others."""
    left = {module: set(imported) - {module} for module, imported in graph.items()}
    while ends := [module for module, imported in left.items() if not imported & left.keys()]:
        for module in ends:
            del left[module]
    reached = {module: _reachable(module, left) for module in left}
    groups = {frozenset(m for m in reached[module] if module in reached[m]) for module in left}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def _reachable(module: str, graph: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    left = [module]
    while left:
        for each in graph[left.pop()] & graph.keys():
            if each not in found:
                found.add(each)
                left.append(each)
    return found


def doubled_class_names() -> dict[str, list[str]]:
    """Return class names of more than one module, with these modules."""
    owners = defaultdict(set)
    for module, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                owners[node.name].add(module)
    return {name: sorted(found) for name, found in owners.items() if len(found) > 1}


def import_graph() -> dict[str, set[str]]:
    known = modules()
    return {module: imports_of(path, known) for module, path in known.items()}


def main() -> None:
    files = modules()
    graph = import_graph()
    lines = {module: len(path.read_text().splitlines()) for module, path in files.items()}
    plain = {module: count for module, count in lines.items() if files[module].name != "__init__.py"}
    importers: dict[str, set[str]] = defaultdict(set)
    for module, imported in graph.items():
        for each in imported:
            importers[each].add(module)
    scraps = [module for module, count in plain.items() if len(importers[module]) == 1 and count < SCRAP]
    print(f"lines                               {sum(lines.values())}")
    print(f"modules                             {len(files)} ({len(plain)} without __init__)")
    print(f"median lines                        {statistics.median(plain.values()):.0f}")
    small = sum(count < SMALL for count in lines.values())
    print(
        f"under {SMALL} lines                      {small} ({sum(n < SMALL for n in plain.values())} without __init__)"
    )
    print(f"one importer and under {SCRAP} lines    {len(scraps)}: {', '.join(scraps)}")
    print(f"import circles                      {circles(graph)}")
    print(f"names of two classes                {doubled_class_names()}")


if __name__ == "__main__":
    main()

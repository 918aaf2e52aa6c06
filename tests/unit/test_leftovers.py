"""Our threads are told apart by their names, and what a test leaves behind is found."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.leftovers import NAMES

PACKAGE = Path(__file__).parents[2] / "spark_elastic"
MAKERS = {"Thread": "name", "InheritableThread": "name", "ThreadPoolExecutor": "thread_name_prefix"}


def texts(node: ast.AST) -> list[str]:
    return [part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)]


def test_every_thread_of_the_package_has_a_name_that_says_so():
    found = 0
    for path in PACKAGE.rglob("*.py"):
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            maker = ast.unparse(call.func).rpartition(".")[2]
            if maker not in MAKERS:
                continue
            found += 1
            names = [word.value for word in call.keywords if word.arg == MAKERS[maker]]
            assert names, f"{path.name}:{call.lineno}: a thread without a name"
            assert texts(names[0])[0].startswith(NAMES), f"{path.name}:{call.lineno}"
    assert found > 10

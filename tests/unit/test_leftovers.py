"""Our threads are told apart by their names, and what a test leaves behind is found."""

from __future__ import annotations

import ast
import threading
from pathlib import Path

import pytest

from tests.leftovers import NAMES, Before, nothing_left

PACKAGE = Path(__file__).parents[2] / "spark_elastic"
MAKERS = {
    "Thread": "name",
    "InheritableThread": "name",
    "Prefetcher": "name",
    "ThreadPoolExecutor": "thread_name_prefix",
}


def texts(node: ast.AST) -> list[str]:
    return [part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)]


def test_every_thread_of_the_package_has_a_name_that_says_so():
    found = 0
    for path in PACKAGE.rglob("*.py"):
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            maker = ast.unparse(call.func).rpartition(".")[2]
            if maker not in MAKERS or path.name == "prefetch.py":  # which is given its name
                continue
            found += 1
            names = [word.value for word in call.keywords if word.arg == MAKERS[maker]]
            if maker == "Prefetcher":
                names = call.args[2:3]
            assert names, f"{path.name}:{call.lineno}: a thread without a name"
            assert texts(names[0])[0].startswith(NAMES), f"{path.name}:{call.lineno}"
    assert found > 10


def test_a_thread_of_ours_that_goes_on_is_named_and_those_of_others_may_go_on():
    go = threading.Event()
    before = Before()
    for name in (f"{NAMES[0]} forgotten", "of a library"):
        threading.Thread(target=go.wait, name=name).start()
    try:
        with pytest.raises(AssertionError, match=r"still there 0 s after the end: spark_elastic forgotten$"):
            before.assert_no_threads_left(timeout_s=0)
        Before().assert_no_threads_left(timeout_s=0)
    finally:
        go.set()
    before.assert_nothing_left()


def test_a_descriptor_that_stays_open_is_named(tmp_path):
    before = Before()
    with (tmp_path / "forgotten").open("w"), pytest.raises(AssertionError, match=r"-> /.*/forgotten$"):
        before.assert_nothing_left(timeout_s=0)
    before.assert_nothing_left()


def test_what_needs_a_moment_to_end_has_it():
    go = threading.Event()
    with nothing_left():
        threading.Thread(target=go.wait, name=f"{NAMES[1]}-slow").start()
        threading.Timer(0.05, go.set).start()

"""The frames of an exception that a user is shown."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import pytest

from spark_elastic.elastic import call_stack
from spark_elastic.task.user_frames import format_error


def function_in(tmp_path: Path, source: str, name: str = "function"):
    file = tmp_path / "train.py"
    file.write_text(textwrap.dedent(source))
    names: dict[str, object] = {}
    exec(compile(file.read_text(), str(file), "exec"), names)
    return names[name]


def through(path: str, function):
    """Call a function from a frame that appears to be in another file."""
    names = {"function": function}
    exec(compile("def call():\n    return function()\n", path, "exec"), names)
    return names["call"]


def error_of(function) -> BaseException:
    with pytest.raises(Exception) as raised:
        function()
    return raised.value.with_traceback(raised.value.__traceback__.tb_next)


OURS = call_stack.__file__
TORCH = str(Path(sys.prefix, "lib", "site-packages", "torch", "nn.py"))


def test_frames_of_this_package_and_of_frameworks_above_the_users_are_left_out(tmp_path):
    function = function_in(tmp_path, "def function():\n    raise ValueError('bad')\n")
    error = error_of(through(OURS, through(TORCH, function)))
    short, full = format_error(error, all_frames=False), format_error(error, all_frames=True)
    assert "in function" in short
    assert OURS not in short
    assert TORCH not in short
    assert OURS in full
    assert TORCH in full
    assert short.rstrip().endswith("ValueError: bad")


def test_frames_of_packages_that_the_user_called_are_shown(tmp_path):
    function = function_in(tmp_path, "import json\ndef function():\n    json.loads('[')\n")
    text = format_error(error_of(through(OURS, function)), all_frames=False)
    assert "train.py" in text
    assert json.__file__ in text


def test_frames_are_left_out_of_causes_too(tmp_path):
    inner = through(OURS, function_in(tmp_path, "def function():\n    raise KeyError('x')\n"))

    def outer():
        try:
            inner()
        except KeyError as error:
            raise ValueError("bad") from error

    text = format_error(error_of(outer), all_frames=False)
    assert "direct cause" in text
    assert "KeyError: 'x'" in text
    assert OURS not in text


def test_an_error_of_this_package_itself_keeps_its_frames():
    names: dict[str, object] = {}
    exec(compile("def fault():\n    raise RuntimeError('a bug')\n", OURS, "exec"), names)
    error = error_of(names["fault"])
    assert OURS in format_error(error, all_frames=False)


@pytest.mark.nightly
def test_a_long_chain_of_causes_is_described():
    def retries():
        last = None
        for attempt in range(2 * sys.getrecursionlimit()):
            try:
                raise ValueError(attempt) from last
            except ValueError as error:
                last = error
        raise last

    text = format_error(error_of(through(OURS, retries)), all_frames=False)
    assert text.count("direct cause") == 2 * sys.getrecursionlimit() - 1
    assert OURS not in text


@pytest.mark.nightly
def test_an_exception_whose_attributes_raise_keeps_its_traceback():
    class Closed(Exception):
        def __getattr__(self, name):
            raise RuntimeError(name)

    def fails():
        raise Closed("x")

    text = format_error(error_of(through(OURS, fails)), all_frames=False)
    assert "in fails" in text
    assert OURS not in text
    assert text.endswith("Closed\n")

from __future__ import annotations

import functools
import threading

import pytest

from spark_elastic.driver.pickled_call import pickled
from spark_elastic.errors import NotPicklableError

LOCK = threading.Lock()


class Model:
    def __init__(self) -> None:
        self.layers = [1, threading.Lock()]


def test_captured_object_that_cannot_be_pickled_is_named_by_its_path():
    model = Model()

    def train():
        return model

    with pytest.raises(NotPicklableError) as caught:
        pickled(train)
    assert caught.value.path.endswith("train → model → .layers → [1]")
    assert caught.value.type_name == "lock"


def test_global_that_a_local_function_uses_is_named():
    def train():
        return LOCK

    train.__module__ = "__main__"  # as in a notebook: pickled by value, with the globals that it uses
    with pytest.raises(NotPicklableError, match="train → LOCK cannot be sent to the workers: lock"):
        pickled(train)


def test_argument_that_cannot_be_pickled_is_named():
    with pytest.raises(NotPicklableError, match=r"args\[1\] → \['f'\]"):
        pickled(print, (1, {"f": threading.Lock()}))
    with pytest.raises(NotPicklableError, match=r"kwargs\['lock'\]"):
        pickled(print, kwargs={"lock": threading.Lock()})


def test_partial_and_bound_method_are_looked_into():
    with pytest.raises(NotPicklableError, match="keywords"):
        pickled(functools.partial(print, file=threading.Lock()))
    with pytest.raises(NotPicklableError, match=r"→ self → \.layers"):
        pickled(BoundTrain().train)


class BoundTrain(Model):
    def train(self):
        return self.layers


def test_object_that_contains_itself_does_not_trap_the_search():
    knot: list[object] = [threading.Lock()]
    knot.insert(0, knot)
    with pytest.raises(NotPicklableError, match=r"args\[0\] → \[1\]"):
        pickled(print, (knot,))

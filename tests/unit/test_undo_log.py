"""The undo log takes back the changes that belong to a repeated step, and no others."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from spark_elastic.elastic.plain_values import CountingProbe, Opaque, UndoLog, difference, independent_copy, same


@pytest.fixture(autouse=True, params=["at once", "with the next reduction"])
def reported(request, monkeypatch):
    """Report steps when they are applied, as PyTorch's optimizers do, or with the reduction that follows."""
    monkeypatch.setattr(Loop, "reported_at_once", request.param == "at once", raising=False)


class Loop:
    """Values followed as by a state; `step` is an optimizer's."""

    reported_at_once: bool

    def __init__(self, **values: Any) -> None:
        object.__setattr__(self, "stepped", False)
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "log", UndoLog())
        object.__setattr__(self, "place", "")
        self.call()

    def __getattr__(self, name: str) -> Any:
        return self.values[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if self.log.follows(name):
            self.log.assigned(name, self.values[name], value, self.place)
        self.values[name] = value

    def at_place(self, place: str) -> None:
        """Make the next assignments at this place of the program."""
        object.__setattr__(self, "place", place)

    def call(self) -> None:
        self.log.begin(independent_copy(self.values))

    def step(self) -> None:
        self.report_the_last_step()
        self.log.entering(self.values.__getitem__)
        if self.reported_at_once:
            self.log.stepped()
        else:
            object.__setattr__(self, "stepped", True)

    def report_the_last_step(self) -> None:
        if self.stepped:
            self.log.stepped_meanwhile()
            object.__setattr__(self, "stepped", False)

    def fails(self) -> dict[str, Any] | None:
        self.report_the_last_step()
        return self.log.undone(self.values.__getitem__)


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_a_counter_that_is_advanced_before_the_step_returns_to_the_last_step(steps):
    loop = Loop(batch=0)
    for _ in range(steps):
        loop.batch += 1
        loop.step()
    loop.batch += 1
    assert loop.fails() == {"batch": steps}


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_a_counter_that_is_advanced_after_the_step_stays(steps):
    loop = Loop(batch=0)
    for _ in range(steps):
        loop.step()
        loop.batch += 1
    assert loop.fails() == {}


def test_a_batch_number_that_the_loop_sets_again_stays():
    loop = Loop(batch=0)
    for number in range(3):
        loop.batch = number
        loop.step()
    loop.batch = 3
    assert loop.fails() == {}  # `for state.batch in range(state.batch, ...)` begins with 3 again


def test_a_counter_that_was_reset_at_the_end_of_an_epoch_returns_to_the_reset():
    loop = Loop(batch=0, epoch=0)
    for _ in range(2):
        loop.batch += 1
        loop.step()
    loop.epoch += 1
    loop.batch = 0
    loop.batch += 1
    assert loop.fails() == {"batch": 0}


def test_the_end_of_an_epoch_before_the_first_step_of_a_call_is_not_mistaken_for_code_after_a_step():
    loop = Loop(batch=2, epoch=0)
    failed = []
    for calls in range(2):
        while loop.epoch < 3:
            while loop.batch < 2:
                if calls and (loop.epoch, loop.batch) in ((1, 1), (2, 0)):
                    failed.append(loop.fails())
                loop.step()
                loop.at_place("after the step")
                loop.batch += 1
            loop.at_place("end of the epoch")
            loop.epoch += 1
            loop.batch = 0
        if not calls:  # called again at the end of an epoch
            loop.epoch, loop.batch = 0, 2
            loop.call()
    assert failed == [{}, {"batch": 2, "epoch": 1}]


def test_an_iteration_without_a_step_does_not_make_code_after_a_step_count_as_before_it():
    loop = Loop(batch=0)
    for _ in range(3):
        loop.step()
        loop.batch += 1
    assert loop.fails() == {}
    loop.call()
    loop.batch += 1  # a turn in which all skip the step
    loop.step()
    loop.batch += 1
    assert loop.fails() is None


def test_changes_before_a_resume_point_do_not_belong_to_the_first_step():
    loop = Loop(batch=0)
    loop.batch += 1  # a turn in which all skip the step
    assert loop.log.awaits_step
    loop.call()
    loop.step()
    assert not loop.log.awaits_step
    loop.batch += 1
    assert loop.fails() == {}


def test_several_passes_of_a_step_are_undone_together():
    loop = Loop(seen=0)
    for _ in range(3):
        loop.seen += 1
        loop.seen += 1
        loop.step()
    loop.seen += 1
    loop.seen += 1
    assert loop.fails() == {"seen": 6}


def test_sums_of_different_amounts_are_undone_exactly():
    loop = Loop(loss=0.0)
    for amount in (0.1, 0.7, 0.3):
        loop.loss += amount
        loop.step()
    before = loop.loss
    loop.loss += 0.9
    assert loop.fails() == {"loss": before}


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ([1], lambda values: values.append(2)),
        ({"n": 0, "seen": []}, lambda values: values.update(n=values["n"] + 1) or values["seen"].append(1)),
        ({"epoch": {"batch": 3}}, lambda values: values["epoch"].update(batch=values["epoch"]["batch"] + 1)),
    ],
)
def test_a_value_that_is_changed_in_place_before_the_step_returns_to_the_last_step(value, change):
    loop = Loop(value=value)
    for _ in range(2):
        change(loop.value)
        loop.step()
    wanted = independent_copy(loop.value)
    change(loop.value)
    assert loop.fails() == {"value": wanted}


def test_a_list_that_grows_after_the_step_stays():
    loop = Loop(losses=[])
    for _ in range(3):
        loop.step()
        loop.losses.append(1)
    assert loop.fails() == {}


def test_a_value_that_has_changed_in_an_unknown_way_cannot_be_undone():
    loop = Loop(losses=[])
    loop.losses.append(1)
    loop.step()
    loop.losses.clear()  # a new epoch, or a part of the step: unknown
    loop.losses.append(2)
    assert loop.fails() is None


def test_a_newcomer_learns_from_the_other_members():
    first = Loop(batch=0, losses=[])
    first.batch += 1
    first.losses.append(1)
    first.step()
    other = UndoLog()
    other.learn_from(first.log.learnt)
    assert other.learnt == ({"batch": (1, frozenset({""}))}, {"losses": ("longer", 1)}, {})


def test_values_are_compared_by_content():
    one, other = SimpleNamespace(a=[1, 2]), SimpleNamespace(a=[1, 2])
    assert same(one, other)
    assert same(np.arange(3), np.arange(3))
    assert not same(np.arange(3), np.arange(4))
    assert same({"a": np.ones(2)}, {"a": np.ones(2)})
    assert not same(1, 1.0)
    assert same(float("nan"), float("nan"))
    assert difference(np.zeros(2), np.ones(2)) != difference(np.zeros(2), np.ones(2))


class Node:
    def __init__(self):
        self.steps, self.children = 0, []


def a_tree():
    root, child = Node(), Node()
    root.children.append(child)
    child.parent = root
    return root


def a_ring():
    ring = {"steps": 0}
    ring["itself"] = ring
    return ring


def test_values_may_contain_themselves():
    for make in (a_tree, a_ring):
        value = make()
        assert same(value, make())
        assert same(value, independent_copy(value))
        loop = Loop(value=value)
        loop.step()
        assert loop.fails() == {}
    later = a_ring()
    later["steps"] = 1
    assert isinstance(difference(a_ring(), later), Opaque)


def test_pickled_parts_outside_of_attributes_are_compared():
    rng = random.Random(1)
    before = independent_copy(rng)
    assert same(before, rng)
    rng.random()
    assert not same(before, rng)
    loop = Loop(rng=rng)
    rng.random()
    loop.step()
    rng.random()
    assert loop.fails() is None  # the repeated step has drawn from it


@pytest.mark.parametrize(("second", "found"), [({"n": 0}, True), ({"n": 1}, False)])
def test_a_probe_finds_loops_that_make_several_steps_before_they_count(second, found):
    probe = CountingProbe()
    for _ in range(2):  # what was found stays known when the function is called again
        probe.begin()
        probe.start({"n": 0})
        probe.compare(second)
        assert probe.several_steps is found
        probe.settle()
        probe.compare({"n": 5})  # the round is over
        assert (probe.found, probe.several_steps) == (found, found)


def test_a_probe_without_values_finds_nothing():
    probe = CountingProbe()
    probe.start({})
    probe.compare({})
    assert not probe.several_steps

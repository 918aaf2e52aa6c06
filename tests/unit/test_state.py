"""States and the loop, with a frontend that plays worlds from a script."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

from spark_elastic.collective.process import Process
from spark_elastic.elastic.finish import LoopHistory
from spark_elastic.elastic.frontend import Entry
from spark_elastic.elastic.loop import run
from spark_elastic.elastic.object_state import ObjectState
from spark_elastic.elastic.plain_values import independent_copy
from spark_elastic.elastic.state import State
from spark_elastic.errors import HorovodInternalError, StateNotMovableError, UsageError
from spark_elastic.membership.topology import StateVersion


class ScriptedFrontend:
    """Hands out the given entries one after the other and notes what it is asked."""

    checkpoints = None

    def __init__(self, *entries: Entry | Exception, updates: tuple[int, ...] = ()) -> None:
        self.entries = list(entries)
        self.updates = list(updates)
        self.checks = 0
        self.rejoined: list[StateVersion | None] = []
        self.versions: list[StateVersion] = []
        self.roots: list[int] = []
        self.loops = LoopHistory(Process())
        self.results: list[Any] = []

    def rank(self) -> int:
        return 0

    def broadcast_object(self, value: Any, root: int) -> Any:
        self.roots.append(root)
        return value

    def alone(self) -> AbstractContextManager[None]:
        return nullcontext()

    def agree_on_update(self) -> bool:
        self.checks += 1
        return self.checks in self.updates

    def enter(self, prepare) -> Entry:
        return self._next()

    def rejoin(self, version: StateVersion | None) -> Entry:
        self.rejoined.append(version)
        return self._next()

    def _next(self) -> Entry:
        entry = self.entries.pop(0)
        if isinstance(entry, Exception):
            raise entry
        return entry

    def finished(self, loop: int, state: State, result: Any) -> None:
        state.save()
        self.loops.finish(loop, state, result)

    def result_of(self, loop: int) -> Any:
        return self.results.pop(0)

    def report_version(self, version: StateVersion) -> None:
        self.versions.append(version)


FIRST = Entry(root=0, version=None, sync=True, moved=False)


def next_world(root: int = 0, steps: int = 0, sync: bool = True, loop: int = 1) -> Entry:
    return Entry(root=root, version=StateVersion(loop, steps), sync=sync, moved=True)


def counting_to(limit: int, fails_at: int | None = None):
    failed = []

    def loop(state):
        while state.n < limit:
            state.n += 1
            state.seen.append(state.n)
            if state.n == fails_at and not failed:
                failed.append(True)
                raise HorovodInternalError("a peer is gone")
            state.commit()
        return state.seen

    return loop


def test_a_failure_returns_to_the_last_commit_and_the_callbacks_run_before_the_sync():
    frontend = ScriptedFrontend(FIRST, next_world(root=1, steps=2))
    state = ObjectState(n=0, seen=[])
    state._frontend = frontend
    order = []
    state.register_reset_callbacks([lambda: order.append(list(frontend.roots))])
    assert run(counting_to(4, fails_at=3))(state) == [1, 2, 3, 4]
    assert order == [[0]]  # the second sync, from rank 1, came after it
    assert frontend.roots == [0, 1]
    assert frontend.rejoined == [StateVersion(steps=2)]
    assert state.progress == 4


def test_a_generator_of_the_interrupted_step_ends_before_the_state_returns():
    frontend = ScriptedFrontend(FIRST, next_world(root=0, steps=2))
    state = ObjectState(n=0, seen=[])
    state._frontend = frontend

    def steps():
        while state.n < 4:
            try:
                yield state.n
            finally:
                state.n += 1

    def loop(state):
        numbers = steps()
        for n in numbers:
            if n == 2 and not frontend.rejoined:
                raise HorovodInternalError("broke")
            state.seen = [*state.seen, n]
            state.commit()
        return state.seen

    # the commit of step 1 comes before the count
    assert run(loop)(state) == [0, 1, 1, 2, 3]


async def a_coroutine(state):
    state.commit()


def a_generator(state):
    yield state.commit()


@pytest.mark.parametrize("function", [a_coroutine, a_generator])
def test_a_function_whose_code_runs_after_the_loop_is_refused(function):
    with pytest.raises(UsageError, match=rf"{function.__name__}, a loop of .*, is a generator or async function"):
        run(function)


def test_a_loop_within_another_and_a_loop_without_a_state_are_refused():
    frontend = ScriptedFrontend(FIRST)
    state = ObjectState(n=0, seen=[])
    state._frontend = frontend
    within = run(counting_to(1))

    def loop(state):
        with pytest.raises(UsageError, match=r"loop of hvd\.elastic\.run, was called within another one"):
            within(state)
        return state.n

    assert run(loop)(state) == 0
    with pytest.raises(UsageError, match=r"first argument of .* is a list and has to be a state"):
        within([])


def test_a_world_that_breaks_before_the_loop_starts_is_left_for_the_next():
    frontend = ScriptedFrontend(HorovodInternalError("broke"), next_world(), next_world())
    state = ObjectState(n=0, seen=[])
    state._frontend = frontend
    calls = []

    def reset():
        calls.append(1)
        if len(calls) == 1:
            raise HorovodInternalError("broke in a callback")

    state.register_reset_callbacks([reset])
    assert run(counting_to(1))(state) == [1]
    assert frontend.rejoined == [None, None]


def test_a_custom_state_returns_to_the_synchronised_values_before_its_first_commit():
    class Mine(State):
        def __init__(self):
            super().__init__(bcast_object=lambda value: 7)  # the others' value
            self.value = self.saved = 0

        def save(self):
            self.saved = self.value

        def restore(self):
            self.value = self.saved

        def sync(self):
            self.value = self._bcast_object(self.value)

    frontend = ScriptedFrontend(next_world(steps=3), next_world(root=0, steps=3, sync=False))
    state = Mine()
    state._frontend = frontend
    held = []
    state.register_reset_callbacks([lambda: held.append(state.value)])

    def loop(state):
        if not frontend.rejoined:
            state.value += 1
            raise HorovodInternalError
        return state.value

    assert run(loop)(state) == 7
    assert frontend.rejoined == [StateVersion(steps=3)]
    assert held == [0, 7]  # it may be the one whose state the next world takes over


def test_changing_a_value_in_place_does_not_change_what_was_saved():
    state = ObjectState(history=[1, [2]], options={"a": {"b": 1}}, point=(1, 2), name="x")
    state.history[1].append(3)
    state.options["a"]["b"] = 2
    state.restore()
    assert state.history == [1, [2]]
    assert state.options == {"a": {"b": 1}}
    state.history.append(4)
    state.restore()
    assert state.history == [1, [2]]


def test_an_object_that_occurs_twice_in_a_state_stays_one_object():
    run = {"steps": 0}
    state = ObjectState(runs=[run], newest={"run": run})
    state.save()
    for _ in range(2):
        state.newest["run"]["steps"] += 1
        state.restore()
        assert state.newest["run"] is state.runs[0]
        assert state.runs == [{"steps": 0}]


def test_values_that_cannot_be_copied_leave_no_partial_copies():
    class Holder:
        def __init__(self):
            self.run, self.lock, self.itself = {"steps": 0}, threading.Lock(), self

    holder = Holder()
    copied = independent_copy({"holder": holder, "run": holder.run, "again": [holder]})
    assert copied["holder"] is holder
    assert copied["again"] == [holder]
    assert copied["run"] == holder.run
    assert copied["run"] is not holder.run


# --- the function is called again, because its world broke after a loop ------------------------------------


def again(frontend: ScriptedFrontend, function):
    """Call the function, and once more as after a failure at its end. Returns: what each call returned."""
    out = [function()]
    frontend.loops.run_again()
    return [*out, function()]


def test_a_finished_loop_takes_up_its_state_when_the_function_is_called_again():
    after_four = StateVersion(steps=4)
    frontend = ScriptedFrontend(FIRST, Entry(root=0, version=after_four, sync=False, moved=True))
    bodies = []

    def function():
        state = ObjectState(n=0, seen=[])
        state._frontend = frontend

        def loop(state):
            bodies.append(state.n)
            return counting_to(4)(state)

        seen = run(loop)(state)
        state.seen.append("changed by the end")  # undone, when the end is done again
        return list(seen), state.version

    first, second = again(frontend, function)
    assert bodies == [0, 4]
    assert first == second == ([1, 2, 3, 4, "changed by the end"], after_four)
    assert frontend.rejoined == [after_four]


class Own(State):
    """A state as Horovod documents it."""

    def __init__(self, value: int, through: bool) -> None:
        super().__init__(bcast_object=lambda value, root_rank=None: value, get_rank=lambda: 0)
        self.value, self.saved, self.through = value, value, through

    def save(self) -> None:
        self.saved = self.value

    def restore(self) -> None:
        self.value = self.saved

    def sync(self) -> None:
        if self.through:
            self.value = self._bcast_object(self.value)
        self.save()


def run_own(frontend: ScriptedFrontend, through: bool) -> tuple[int, int]:
    state = Own(0, through)
    state._frontend = frontend

    def loop(state):
        state.value += 1 if state.value < 3 else 0
        return state.value if state.value == 3 else loop(state)

    out = run(loop)(state)
    left = state.value
    state.value = -1
    return out, left


def test_a_custom_state_that_broadcasts_without_bcast_object_is_named():
    frontend = ScriptedFrontend(FIRST)
    with pytest.raises(StateNotMovableError, match=r"Own\.sync\(\) does not broadcast its values with self\._bcast"):
        again(frontend, lambda: run_own(frontend, through=False))

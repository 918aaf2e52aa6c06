"""States and the loop, with a frontend that plays worlds from a script."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from spark_elastic.errors import HorovodInternalError, HostsUpdatedInterrupt
from spark_elastic.state import Entry, ObjectState, State, elastic_loop, independent_copy


class ScriptedFrontend:
    """Hands out the given entries one after the other and notes what it is asked."""

    def __init__(self, *entries: Entry | Exception, updates: tuple[int, ...] = ()) -> None:
        self.entries = list(entries)
        self.updates = list(updates)
        self.checks = 0
        self.rejoined: list[int | None] = []
        self.progress: list[int] = []
        self.roots: list[int] = []

    def rank(self) -> int:
        return 0

    def broadcast_object(self, value: Any, root: int) -> Any:
        self.roots.append(root)
        return value

    def agree_on_update(self) -> bool:
        self.checks += 1
        return self.checks in self.updates

    def enter(self, prepare) -> Entry:
        return self._next()

    def rejoin(self, progress: int | None) -> Entry:
        self.rejoined.append(progress)
        return self._next()

    def _next(self) -> Entry:
        entry = self.entries.pop(0)
        if isinstance(entry, Exception):
            raise entry
        return entry

    def report_progress(self, progress: int) -> None:
        self.progress.append(progress)


FIRST = Entry(root=0, progress=None, sync=True, moved=False)


def next_world(root: int = 0, progress: int = 0, sync: bool = True) -> Entry:
    return Entry(root=root, progress=progress, sync=sync, moved=True)


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
    frontend = ScriptedFrontend(FIRST, next_world(root=1, progress=2))
    state = ObjectState(n=0, seen=[])
    state._frontend = frontend
    order = []
    state.register_reset_callbacks([lambda: order.append(list(frontend.roots))])
    assert elastic_loop(counting_to(4, fails_at=3), frontend)(state) == [1, 2, 3, 4]
    assert order == [[0]]  # the second sync, from rank 1, came after it
    assert frontend.roots == [0, 1]
    assert frontend.rejoined == [2]
    assert state.progress == 4


def test_an_update_leaves_the_loop_at_a_commit_without_going_back():
    frontend = ScriptedFrontend(FIRST, next_world(progress=2, sync=False), updates=(2,))
    state = ObjectState(n=0, seen=[])
    state._frontend = frontend
    assert elastic_loop(counting_to(4), frontend)(state=state) == [1, 2, 3, 4]
    assert frontend.rejoined == [2]
    assert frontend.roots == [0]  # all members stood at the same commit: nothing to take over


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
    assert elastic_loop(counting_to(1), frontend)(state) == [1]
    assert frontend.rejoined == [None, None]


def test_another_error_leaves_the_loop_at_once():
    frontend = ScriptedFrontend(FIRST)

    def loop(state):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        elastic_loop(loop, frontend)(ObjectState(n=0))
    assert frontend.rejoined == []


def test_a_state_of_ones_own_needs_save_restore_and_sync_only():
    class Mine(State):
        def __init__(self):
            super().__init__(bcast_object=lambda value: value, get_rank=lambda: 0)
            self.value = self.saved = 0
            self.calls = []

        def save(self):
            self.saved = self.value

        def restore(self):
            self.calls.append("restore")
            self.value = self.saved

        def sync(self):
            self.calls.append("sync")

    frontend = ScriptedFrontend(FIRST, next_world(progress=1))
    state = Mine()
    attempts = []

    def loop(state):
        attempts.append(state.value)
        state.value += 1
        if len(attempts) == 1:
            state.commit()
            state.value += 10
            raise HorovodInternalError
        return state.value

    assert elastic_loop(loop, frontend)(state) == 2
    assert state.calls == ["sync", "restore", "sync"]
    assert frontend.progress[-1] == 1


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


def test_what_cannot_be_copied_is_shared():
    lock = threading.Lock()
    assert independent_copy({"lock": lock})["lock"] is lock


def test_the_interrupt_has_horovods_attribute():
    assert HostsUpdatedInterrupt(skip_sync=True).skip_sync is True

"""One driver at a time has a run's folder, and one that has lost it finds that out before it writes."""

import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from spark_elastic.data.store import Store
from spark_elastic.errors import RunTakenError
from spark_elastic.ml.run_folder import clear
from spark_elastic.runs import lease as run_lease
from spark_elastic.runs.checkpoints import CheckpointFacts, Checkpoints, Contents, name_of
from spark_elastic.runs.lease import (
    BEAT_S,
    LEASE_S,
    OWNERS,
    WATCH_S,
    Fence,
    Owner,
    ProcessIdentity,
    RunLease,
    RunMissingError,
    acquire,
    opened_run,
    started_of,
)

HERE = ProcessIdentity.this()
ELSEWHERE = ProcessIdentity("host-b", "host-b:boot:pid", 42, 1000, "train.py")
THIRD = ProcessIdentity("host-c", "host-c:boot:pid", 42, 1000, "train.py")


@pytest.fixture
def run(tmp_path):
    return Store.create(tmp_path / "run")


class Time:
    """Clocks that advance while somebody waits; `_beside` is called after each `BEAT_S`."""

    def __init__(self, skew_s=0.0):
        self.now, self.waited, self._beside, self._skew_s = 1_000_000.0, 0.0, None, skew_s

    def wall(self):
        return self.now + self._skew_s

    def monotonic(self):
        return self.now

    def pause(self, seconds):
        before = self.waited // BEAT_S
        self.now += seconds
        self.waited += seconds
        if self._beside is not None and self.waited // BEAT_S > before:
            self._beside()

    def take(self, run, me, known_token=0):
        return acquire(run, known_token, me=me, wall=self.wall, monotonic=self.monotonic, pause=self.pause)


def write(run, owner):
    run.write_bytes(f"{OWNERS}/{owner.name}", owner.dumps())


def test_first_driver_gets_the_run_and_tokens_increase(run):
    time = Time()
    first = time.take(run, HERE)
    write(run, replace(first, released=True))
    second = time.take(run, ELSEWHERE)
    assert (first.token, second.token, time.waited) == (1, 2, 0)
    assert [entry.path for entry in run.list(OWNERS)] == [f"{OWNERS}/{second.name}"]
    Fence(run, second.token, second.name).check()


def test_tokens_continue_after_those_of_the_checkpoints(run):
    assert Time().take(run, HERE, known_token=7).token == 8


def test_second_driver_is_refused_with_the_name_of_the_first(run):
    time = Time()
    first = time.take(run, ELSEWHERE)
    beats = iter(range(1, 100))
    time._beside = lambda: write(run, replace(first, beat=next(beats), beat_at=time.wall()))
    expected = r"held by the driver with pid 42 on host-b \(train\.py\), since \d{4}-.*, last heard of 0 s ago.*run_id"
    with pytest.raises(RunTakenError, match=expected):
        time.take(run, HERE)
    assert time.waited <= BEAT_S + 1
    Fence(run, first.token, first.name).check()


def test_driver_without_heartbeats_is_replaced_after_a_minute_and_notices(run):
    time = Time()
    first = time.take(run, ELSEWHERE)
    second = time.take(run, HERE)
    assert LEASE_S - 1 <= time.waited <= LEASE_S + 1
    assert second.token == 2
    with pytest.raises(
        RunTakenError, match=r"was taken over by the driver with pid \d+ on .*stops so that it overwrites nothing"
    ):
        Fence(run, first.token, first.name).check()


def test_stale_lease_is_watched_for_a_while_because_clocks_differ(run):
    time = Time()
    first = time.take(run, ELSEWHERE)
    time.now += 3600
    time.take(run, THIRD)
    assert WATCH_S <= time.waited <= WATCH_S + 1
    ahead = Time(skew_s=86_400.0)  # by its clock everybody else has been silent for a day
    newest = next(Owner.loads(run.read_bytes(entry.path)) for entry in run.list(OWNERS))
    beats = iter(range(1, 100))
    ahead._beside = lambda: write(run, replace(newest, beat=next(beats)))
    with pytest.raises(RunTakenError):
        ahead.take(run, HERE)
    assert newest.process == THIRD
    assert first.process == ELSEWHERE


def test_killed_driver_on_this_host_is_replaced_at_once(run, monkeypatch):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = started_of(child.pid)
    alive = replace(HERE, pid=child.pid, started=started)
    assert not alive.is_dead(HERE)
    assert replace(alive, started=started - 1).is_dead(HERE), "its number is another process's by now"
    child.communicate()
    assert alive.is_dead(HERE)
    assert not replace(alive, machine="another").is_dead(HERE)
    with monkeypatch.context() as proc:  # which hides when a process was started
        proc.setattr(run_lease, "started_of", lambda pid: 0)
        assert alive.is_dead(HERE)
        assert not replace(alive, pid=os.getppid()).is_dead(HERE)
    time = Time()
    first = time.take(run, alive)
    assert time.take(run, HERE).token == 2
    assert time.waited == 0
    with pytest.raises(RunTakenError):
        Fence(run, first.token, first.name).check()


def test_own_process_cannot_hold_the_run_twice(run):
    with opened_run(run), pytest.raises(RunTakenError, match=f"pid {os.getpid()}"), opened_run(run):
        pass
    with opened_run(run) as lease:
        assert lease.fence.token == 2


def test_one_of_many_simultaneous_drivers_gets_the_run(run):
    begin, taken, errors = threading.Barrier(6), [], []

    def contend(number):
        me = ProcessIdentity(f"host-{number}", f"machine-{number}", number, 1, "")
        begin.wait()
        try:
            time = Time()
            owner = time.take(run, me)
            Fence(run, owner.token, owner.name).check()
            taken.append(owner)
        except RunTakenError as error:
            errors.append(error)

    threads = [threading.Thread(target=contend, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    tokens = [owner.token for owner in taken]
    assert len(set(tokens)) == len(tokens), "no two have the same place"
    for owner in sorted(taken, key=lambda owner: owner.token)[:-1]:
        with pytest.raises(RunTakenError):
            Fence(run, owner.token, owner.name).check()


def test_unreadable_file_counts_as_an_owner_for_a_minute(run):
    time = Time()
    run.write_bytes(f"{OWNERS}/000004-{'0' * 32}.json", b"{")
    assert time.take(run, HERE).token == 5
    assert LEASE_S <= time.waited <= LEASE_S + 1


def test_deleted_folder_is_not_written_again(run):
    owner = Time().take(run, HERE)
    run.delete()
    with pytest.raises(RunMissingError, match="it was deleted, or its storage is away"):
        Fence(run, owner.token, owner.name).check()
    assert not run.exists()


def given_up(lease, happens, why):
    """Let something happen to a run, and check that its driver gives the run up."""
    told = threading.Event()

    def job():
        happens()
        assert told.wait(30)
        raise ConnectionError("it was cancelled for that")

    with pytest.raises(RunTakenError, match=why), lease.on_taken(lambda why: told.set()):
        job()


def test_run_that_stays_away_is_given_up_and_not_written_again(run):
    lease = RunLease(run, acquire(run), beat_s=0.01, patience_s=0.1)
    given_up(lease, run.delete, r"is not there.*gives it up")
    lease.give_back()
    assert not run.exists()


def test_run_that_comes_back_is_held_as_before(run, tmp_path):
    lease = RunLease(run, acquire(run), beat_s=0.01, patience_s=30)
    away = tmp_path / "away"
    (tmp_path / "run").rename(away)
    with pytest.raises(RunMissingError):
        lease.check()
    threading.Event().wait(0.1)  # some heartbeats
    assert not run.exists()
    away.rename(tmp_path / "run")
    lease.check()
    lease.give_back()
    with opened_run(run) as next_one:
        assert next_one.fence.token == 2


def taken_over(run, lease):
    """As if this process had stood still, and another driver had come."""
    token = lease.fence.token + 1
    write(run, Owner(token, f"{token:06d}-{'f' * 32}.json", ELSEWHERE, 1.0, 0, 1.0))


def test_replaced_driver_notices_and_writes_nothing(run):
    lease = RunLease(run, acquire(run), beat_s=0.01)
    given_up(lease, lambda: taken_over(run, lease), "by the driver with pid 42 on host-b")
    with pytest.raises(RunTakenError):
        lease.check()
    before = run.list(OWNERS)
    lease.give_back()
    assert run.list(OWNERS) == before


def contents(number, token):
    facts = CheckpointFacts(name_of(number, token), number, 0, number, (), token)
    return Contents(facts, {"of": token}, {"state.pt": bytes([token]) * 100})


def test_checkpoints_of_a_replaced_driver_are_refused_and_never_the_latest(run):
    with opened_run(run) as lease:
        old = Checkpoints(run.sub("checkpoints"), lease.fence)
        old.write(contents(5, 1))
        taken_over(run, lease)
        with pytest.raises(RunTakenError):
            old.write(contents(9, 1))
        Checkpoints(old.store).write(contents(9, 1))  # one that was on its way
        new = Checkpoints(old.store)
        assert new.newest_token() == 1
        new.write(contents(6, 2))
        assert (new.latest().step, new.latest().token) == (6, 2)
        new.write(contents(9, 2))
        assert old.load(name_of(9, 1)).document == {"of": 1}, "neither has replaced the other's"
        with pytest.raises(RunTakenError):
            old.keep(1)
        assert len(new.complete()) == 4, "the replaced driver has deleted none"
        new.keep(1)
        assert [facts.name for facts in new.complete()] == [name_of(9, 2)]


def test_driver_that_is_replaced_while_it_clears_the_run_deletes_nothing_more(run, monkeypatch):
    with opened_run(run) as lease:
        for number in (1, 2, 3):
            Checkpoints(run.sub("checkpoints"), lease.fence).write(contents(number, 1))
        delete, deleted = Store.delete, []

        def take_over_after_the_first(store, path=""):
            delete(store, path)
            deleted.append(path)
            if len(deleted) == 1:
                taken_over(run, lease)

        with monkeypatch.context() as storage:
            storage.setattr(Store, "delete", take_over_after_the_first)
            with pytest.raises(RunTakenError):
                clear(run, lease)
        assert [facts.step for facts in Checkpoints(run.sub("checkpoints")).complete()] == [2, 3]


def test_file_whose_writer_was_replaced_meanwhile_does_not_get_its_name(run):
    with opened_run(run) as lease:
        run.write_bytes("model.pt", b"of the other driver")

        def check():
            taken_over(run, lease)
            lease.check()

        with pytest.raises(RunTakenError):
            run.write_bytes("model.pt", b"late", check=check)
        assert run.read_bytes("model.pt") == b"of the other driver"
        assert sorted(entry.path for entry in run.list()) == ["model.pt", OWNERS]

"""Checkpoints are complete or not there at all, whatever is cut off and whenever the writer ends."""

from __future__ import annotations

import threading

import pytest

from spark_elastic.data.manifest import seal
from spark_elastic.data.store import Store
from spark_elastic.errors import CheckpointError
from spark_elastic.runs.checkpoints import MANIFEST, CheckpointFacts, Checkpoints, CheckpointWriter, Contents


def contents(number: int, best: tuple[str, ...] = ()) -> Contents:
    facts = CheckpointFacts(f"{number:012d}", step=number, epoch=number // 10, position=number % 10, best=best)
    return Contents(facts, {"at": number}, {"state.pt": bytes(range(256)) * 40, "more": b"x" * number})


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(Store.create(tmp_path / "checkpoints"))


def test_what_was_written_is_read_back(checkpoints):
    checkpoints.store.write_bytes("000000000001/state.pt", b"half of it")
    assert (checkpoints.latest(), checkpoints.complete()) == (None, [])
    checkpoints.write(contents(12))
    assert checkpoints.load("000000000012") == contents(12)
    assert checkpoints.latest() == contents(12).facts


@pytest.mark.parametrize("keep", [None, 0, 100, 0.5, -1], ids=["gone", "empty", "100 bytes", "half", "all but one"])
@pytest.mark.parametrize("file", ["state.pt", "more", MANIFEST])
def test_a_file_cut_off_anywhere_leaves_the_one_before_as_the_latest(checkpoints, tmp_path, file, keep):
    checkpoints.write(contents(110))
    checkpoints.write(contents(120))
    cut = tmp_path / "checkpoints" / "000000000120" / file
    data = cut.read_bytes()
    cut.unlink() if keep is None else cut.write_bytes(data[: int(len(data) * keep) if keep == 0.5 else keep])
    assert checkpoints.latest().step == 110
    assert [facts.step for facts in checkpoints.complete()] == [110]
    with pytest.raises(CheckpointError):
        checkpoints.load("000000000120")


def flip(path, at=0.5):
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 1
    path.write_bytes(data)


def test_error_lists_the_damage_when_all_checkpoints_are_damaged(checkpoints, tmp_path):
    for number in (110, 120):
        checkpoints.write(contents(number))
        flip(tmp_path / "checkpoints" / f"{number:012d}" / "state.pt")
    with pytest.raises(CheckpointError, match=r"000000000120 .*state\.pt is not what.*000000000110 .*resume=False"):
        checkpoints.latest()


def test_damaged_checkpoint_does_not_count_as_kept(checkpoints, tmp_path):
    for number in (1, 2, 3):
        checkpoints.write(contents(number))
    flip(tmp_path / "checkpoints" / "000000000003" / "state.pt")
    checkpoints.keep(1)
    assert checkpoints.latest().step == 2
    checkpoints.write(contents(4))
    checkpoints.keep(1)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["000000000004"]


def test_a_flipped_bit_anywhere_in_the_manifest_is_found(checkpoints, tmp_path):
    checkpoints.write(contents(1))
    checkpoints.write(contents(2))
    manifest = tmp_path / "checkpoints" / "000000000002" / MANIFEST
    written = manifest.read_bytes()
    for at in range(len(written)):
        changed = bytearray(written)
        changed[at] ^= 4
        manifest.write_bytes(changed)
        try:
            # between two values there are spaces, of which it does not matter how many there are
            assert checkpoints.load("000000000002") == contents(2)
        except CheckpointError:
            assert checkpoints.latest().step == 1


def test_newer_version_is_reported(checkpoints):
    checkpoints.store.write_bytes(
        f"000000000001/{MANIFEST}", seal({"format": "spark_elastic.checkpoint", "version": 9, "files": {}})
    )
    with pytest.raises(CheckpointError, match="version 9; this package reads 1"):
        checkpoints.load("000000000001")


def test_the_best_by_each_value_is_kept(checkpoints):
    for number, best in enumerate([("a",), ("a", "b"), ("a",), (), ("c",), ()]):
        checkpoints.write(contents(number, best))
    checkpoints.keep(1)
    assert [facts.step for facts in checkpoints.complete()] == [1, 2, 4, 5]
    assert [facts.step for facts in checkpoints.complete() if "b" in facts.best] == [1]


def test_incomplete_checkpoint_is_removed_when_a_newer_one_is_complete(checkpoints, tmp_path):
    checkpoints.store.write_bytes("000000000001/state.pt", b"half of it")
    checkpoints.write(contents(2))
    checkpoints.store.write_bytes("000000000003/state.pt", b"being written")
    checkpoints.keep(3)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["000000000002", "000000000003"]


def test_people_are_notified_once_of_failing_and_once_of_recovered_writes(checkpoints):
    said = []

    def fails():
        raise OSError("the disk is full\n(and more)")

    writer = CheckpointWriter(checkpoints, 2, said.append)
    for make in (lambda: contents(1), fails, fails, lambda: contents(2), lambda: contents(3), fails):
        writer.submit(make)
    writer.close()
    first = "a checkpoint could not be written (OSError: the disk is full); training continues"
    assert said == [first, "checkpoints can be written again", first]


def test_people_are_notified_once_of_checkpoints_that_cannot_be_removed(checkpoints, monkeypatch):
    said = []

    def refuses(self, path):
        raise PermissionError("objects are locked")

    monkeypatch.setattr(Store, "delete", refuses)
    writer = CheckpointWriter(checkpoints, 1, said.append)
    for number in range(1, 5):
        writer.submit(lambda number=number: contents(number))
    writer.drain()
    writer.close()
    assert said == [
        "older checkpoints could not be removed, and stay (PermissionError: objects are locked); training continues"
    ]
    assert [facts.step for facts in checkpoints.complete()] == [1, 2, 3, 4]


def test_hung_storage_holds_up_nobody_and_people_are_told(checkpoints, monkeypatch):
    clock, said, made, over = [0.0], [], [], threading.Event()
    write = checkpoints.write
    monkeypatch.setattr(checkpoints, "write", lambda contents: over.wait(60) and write(contents))
    writer = CheckpointWriter(checkpoints, 1, said.append, now=lambda: clock[0])
    writer.submit(lambda: contents(1), 1)
    while writer._waiting:
        writer._thread.join(0.001)
    clock[0] = 10.0
    for step, best in ((2, ("loss",)), (3, ()), (4, ()), (5, ())):
        writer.submit(lambda step=step, best=best: made.append(step) or contents(step, best), step, best)
    for clock[0] in (29.0, 31.0, 45.0, 61.0, 62.0, 63.0):
        writer.watch()
    assert [line.partition(" has been being written to ")[0] for line in said] == ["the checkpoint of step 1"] * 2
    assert [line.rpartition(" for ")[2] for line in said] == [f"{s} s; training continues" for s in (31, 62)]
    later = threading.Timer(0.1, lambda: clock.__setitem__(0, 100.0))
    later.start()
    with pytest.raises(CheckpointError, match=r"not written to .* within 5 s; the training ends without it"):
        writer.drain(5.0)
    later.join()
    over.set()
    writer.close()
    assert made == [2, 5], "the best and the newest are written once the storage answers"


def failing(read, times, error):
    left = [times]

    def fails(path):
        if left[0]:
            left[0] -= 1
            raise error
        return read(path)

    return fails


@pytest.mark.parametrize("method", ["read_bytes", "checksum"])
@pytest.mark.parametrize("times", [1, 3])
def test_failed_read_is_repeated_and_the_newest_checkpoint_is_the_latest(checkpoints, monkeypatch, method, times):
    for number in (1, 2):
        checkpoints.write(contents(number))
    pauses = []
    there = Checkpoints(checkpoints.store, pause=pauses.append)
    fails = failing(getattr(checkpoints.store, method), times, OSError("input/output"))
    monkeypatch.setattr(Store, method, lambda self, path: fails(path))
    assert there.latest().step == 2
    assert pauses == [0.5, 1.0, 2.0][:times]


def test_checkpoint_that_cannot_be_read_is_not_replaced_by_an_older_one(checkpoints, monkeypatch):
    for number in (1, 2):
        checkpoints.write(contents(number))
    there = Checkpoints(checkpoints.store, pause=lambda _: None)

    def fails(self, path):
        raise PermissionError("not now")

    monkeypatch.setattr(Store, "read_bytes", fails)
    with pytest.raises(CheckpointError, match=r"000000000002 .* not now.* start again when the storage answers"):
        there.latest()


@pytest.mark.parametrize("method", ["read_bytes", "checksum"])
def test_best_checkpoint_that_cannot_be_read_now_is_not_removed(checkpoints, monkeypatch, method):
    for number in (1, 2, 3):
        checkpoints.write(contents(number, best=("loss min",) if number == 1 else ()))
    there, works = Checkpoints(checkpoints.store, pause=lambda _: None), getattr(Store, method)

    def fails(self, path):
        if path.startswith("000000000001"):
            raise PermissionError("not now")
        return works(self, path)

    monkeypatch.setattr(Store, method, fails)
    there.keep(1)
    monkeypatch.undo()
    there.keep(1)
    assert [facts.step for facts in checkpoints.complete()] == [1, 3]


def test_drain_raises_a_failed_write_unless_a_later_one_succeeded(checkpoints):
    def fails():
        raise OSError("the disk is full")

    writer = CheckpointWriter(checkpoints, keep=2)
    writer.submit(fails)
    with pytest.raises(CheckpointError, match="the disk is full"):
        writer.drain()
    writer.submit(lambda: contents(1))
    writer.drain()
    writer.close()

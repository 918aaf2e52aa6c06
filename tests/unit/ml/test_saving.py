"""What a training has come to is not thrown away because a storage does not answer for a while."""

import threading

import pytest

from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidSettingsError, RunTakenError
from spark_elastic.ml.training.saving import SAVE_TIMEOUT_S, ResultWriter, save_timeout_s

FILES = {"model.pt": b"weights", "history.json": b"{}"}


class Storage:
    """A store of which a file cannot be written until the clock says so."""

    def __init__(self, store, refuses, until):
        self.url, self._store, self._refuses, self._until = store.url, store, refuses, until
        self.now = 100.0
        self.said = []
        self.waits = []

    def write_bytes(self, name, data, **options):
        if name == self._refuses and self.now < self._until:
            raise OSError("No space left on device")
        self._store.write_bytes(name, data, **options)

    def wait(self, seconds):
        self.waits.append(seconds)
        self.now += seconds
        return False

    def saving(self, check=lambda: None, **options):
        made = ResultWriter(self, FILES, check, self.said.append, now=lambda: self.now, wait=self.wait, **options)
        assert made.is_done(30)
        made.close()
        return made


@pytest.fixture
def store(tmp_path):
    return Store.create(tmp_path)


def test_writes_are_retried_for_minutes_with_notices_of_the_time_left(store):
    storage = Storage(store, "model.pt", until=100 + 200)
    assert storage.saving().unsaved == {}
    assert store.read_bytes("model.pt") == b"weights"
    first, *more, last = storage.said
    assert "model.pt could not be written" in first
    assert "(OSError: No space left on device); retrying for 5 minutes, then it is sent to the driver instead" in first
    assert 5 <= len(more) <= 7
    assert f"is written to {store.url} now, after " in last


def test_file_that_cannot_be_written_is_unsaved_and_the_rest_is_written(store):
    storage = Storage(store, "model.pt", until=1e9)
    assert storage.saving().unsaved == {"model.pt": b"weights"}
    assert store.exists("history.json")
    assert SAVE_TIMEOUT_S - 1 <= storage.now - 100 <= SAVE_TIMEOUT_S + 1
    assert "with the results of the job instead" in storage.said[-1]


def test_model_is_written_although_the_lease_cannot_be_checked(store):
    def check():
        raise RuntimeError("HTTP 503, as its package has it")

    assert Storage(store, "model.pt", until=0).saving(check).unsaved == {}


def test_taken_run_is_not_written_and_not_retried(store):
    def check():
        raise RunTakenError("another driver has the run")

    storage = Storage(store, "model.pt", until=0)
    with pytest.raises(RunTakenError):
        storage.saving(check)
    assert store.list() == []
    assert storage.waits == []


def test_failed_check_of_the_lease_is_retried_with_the_write(store):
    storage = Storage(store, "model.pt", until=110)

    def check():
        if storage.now < 110:
            raise ConnectionError("the name node is in safe mode")

    assert storage.saving(check).unsaved == {}


@pytest.mark.parametrize(
    ("text", "expected"), [("", SAVE_TIMEOUT_S), ("0", 0), ("12.5", 12.5), ("-1", None), ("long", None)]
)
def test_timeout_is_read_from_the_environment(text, expected):
    if expected is None:
        with pytest.raises(InvalidSettingsError, match="SPARK_ELASTIC_SAVE_TIMEOUT must be a number of seconds"):
            save_timeout_s({"SPARK_ELASTIC_SAVE_TIMEOUT": text})
    else:
        assert save_timeout_s({"SPARK_ELASTIC_SAVE_TIMEOUT": text}) == expected


def test_storage_that_hangs_is_told_and_given_up_after_twice_the_time(store):
    storage, over, inside = Storage(store, "model.pt", until=0), threading.Event(), threading.Event()

    def hangs(*_, **__):
        inside.set()
        over.wait(60)
        raise OSError("the test is over")

    storage.write_bytes = hangs
    writer = ResultWriter(storage, FILES, lambda: None, storage.said.append, now=lambda: storage.now)
    assert inside.wait(30)
    for storage.now in (120.0, 131.0, 140.0, 699.0):
        assert not writer.is_done(0.0)
    assert len(storage.said) == 2
    assert "has been being written to" in storage.said[0]
    assert "for 31 s; without an answer after 10 minutes it is sent to the driver instead" in storage.said[0]
    storage.now = 701.0
    assert writer.is_done(0.0)
    assert writer.unsaved == FILES
    assert "history.json" in storage.said[-1]
    assert "model.pt" in storage.said[-1]
    over.set()
    writer.close()
    assert writer.unsaved == FILES

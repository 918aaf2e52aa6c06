"""Whole trainings under the real driver, whose workers are killed and replaced."""

import os
import signal
from pathlib import Path

import pytest

from spark_elastic.membership.timeline import WorldStarted
from tests.unit.ml.torch import trainings
from tests.unit.ml.torch.trainings import assert_as_undisturbed

PREIMPORT = ("torch",)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("set")
    trainings.make_set(folder / "set")
    return folder / "set"


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    return trainings.alone(trainings.make_training(data, folder)), trainings.weights(folder)


def train_with_kills(data, folder, kills, ends=()):
    """kills: [(event, count, rank)], ends: ranks that die while they return the model; each happens once in the whole
    job, whoever has that rank then."""
    import spark_elastic.torch as hvd

    def kill(number, rank):
        marker = Path(folder, f"killed-{number}")
        if hvd.rank() == rank and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    callbacks = [
        trainings.At(event, count, lambda number=number, rank=rank: kill(number, rank))
        for number, (event, count, rank) in enumerate(kills)
    ]
    result = trainings.outcome(trainings.make_training(data, folder, callbacks=callbacks))
    for number, rank in enumerate(ends, start=len(kills)):
        kill(number, rank)
    return result


def sizes(job):
    return [record.size for record in job.timeline() if isinstance(record, WorldStarted)]


def test_workers_that_are_killed_and_replaced_change_nothing(start_job, data, tmp_path, undisturbed):
    kills, ends = [("on_validation_end", 1, 1)], [0]  # and who is rank 0 while it returns the model
    arguments = data, str(tmp_path), kills, ends
    job = start_job(train_with_kills, arguments, num_proc=3, min_num_proc=1, preimport=PREIMPORT)
    results = job.result(120)
    assert len(sizes(job)) > len(kills) + len(ends)
    assert len(list(tmp_path.glob("killed-*"))) == len(kills) + len(ends)
    assert len(results) == sizes(job)[-1]
    for result in results:
        assert_as_undisturbed(result, tmp_path, undisturbed)

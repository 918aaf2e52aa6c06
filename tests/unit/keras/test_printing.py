"""What Keras prints is printed by rank 0 alone, in any world."""

from __future__ import annotations

import keras
import pytest

from spark_elastic.collective.process import Position
from spark_elastic.keras.printing import PrintedByRank0


@pytest.fixture(autouse=True)
def _keras_prints():
    yield
    keras.config.enable_interactive_logging()


def printed(capsys) -> bool:
    """Have a callback of Keras print its line. Returns whether it appeared."""
    stop = keras.callbacks.EarlyStopping(patience=1, verbose=1)
    stop.stopped_epoch = 3
    stop.on_train_end()
    return "early stopping" in capsys.readouterr().out


def test_only_rank_0_prints(capsys):
    one = PrintedByRank0()
    one.follow(Position(rank=0, size=2))
    assert printed(capsys)
    one.follow(Position(rank=1, size=2))
    assert not printed(capsys)


def test_worker_that_becomes_rank_0_prints_from_then_on(capsys):
    one = PrintedByRank0()
    one.follow(Position(rank=1, size=2))
    one.follow(Position(rank=0, size=1))
    assert printed(capsys)
    one.follow(Position(rank=1, size=2))
    assert not printed(capsys)


def test_program_that_turned_it_on_prints_on_every_rank(capsys):
    one = PrintedByRank0()
    one.follow(Position(rank=1, size=2))
    keras.config.enable_interactive_logging()
    one.follow(Position(rank=1, size=3))
    assert printed(capsys)


def test_program_that_turned_it_off_prints_nowhere(capsys):
    keras.config.disable_interactive_logging()
    one = PrintedByRank0()
    one.follow(Position(rank=1, size=2))
    one.follow(Position(rank=0, size=1))
    assert not printed(capsys)

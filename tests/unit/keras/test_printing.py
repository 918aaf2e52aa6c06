"""What Keras prints is printed by rank 0 alone, in any world."""

from __future__ import annotations

import keras
import pytest

from spark_elastic.collective.process import Position
from spark_elastic.keras import printing


@pytest.fixture(autouse=True)
def _keras_prints(monkeypatch):
    monkeypatch.setattr(printing, "_muted", False)
    yield
    keras.config.enable_interactive_logging()


def printed(capsys) -> bool:
    """Have a callback of Keras print its line. Returns whether it appeared."""
    stop = keras.callbacks.EarlyStopping(patience=1, verbose=1)
    stop.stopped_epoch = 3
    stop.on_train_end()
    return "early stopping" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ranks", "program", "prints"),
    [
        ([0], "", True),
        ([0, 1], "", False),
        ([1, 0], "", True),
        ([1, 0, 1], "", False),
        ([1, 1], "turns it on after init", True),
        ([1, 0], "turns it off before init", False),
    ],
)
def test_rank_0_alone_prints_unless_the_program_has_decided(ranks, program, prints, capsys):
    """`ranks`: those that this process has in one world after the other."""
    if "off" in program:
        keras.config.disable_interactive_logging()
    for rank in ranks:
        printing.print_by_rank_0(Position(rank=rank, size=2))
        if "on after" in program:
            keras.config.enable_interactive_logging()
    assert printed(capsys) == prints

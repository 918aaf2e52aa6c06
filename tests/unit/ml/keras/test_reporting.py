"""What rank 0 tells of a training of a Keras model while it goes on."""

from __future__ import annotations

import pytest

from spark_elastic.collective.process import init
from spark_elastic.ml.keras.assembly import assemble
from spark_elastic.ml.training.assembly import run
from spark_elastic.torch import shutdown
from tests.unit.ml.keras.trainings import in_float64, make_training


def test_live_values_equal_those_of_the_history(data, tmp_path):
    init()
    told = []
    try:
        with in_float64():
            trainer = assemble(make_training(data, tmp_path, epochs=1))
            logs = trainer.engine.logs

            def both(sums, pieces, prefix=""):
                out = logs(sums, pieces, prefix)
                if not prefix:
                    told.append((trainer.engine.told(sums), out))
                return out

            trainer.engine.logs = both
            run(trainer)
    finally:
        shutdown()
    assert told
    for now, later in told:
        assert set(now) == {"loss", "accuracy"}  # the sum of labels is no mean
        assert now == pytest.approx({name: later[name] for name in now})

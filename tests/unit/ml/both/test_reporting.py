"""The live values of a training, which rank 0 reports between the rows of the history."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from spark_elastic.collective.process import init
from spark_elastic.torch import shutdown

ASSEMBLE = {"torch": "spark_elastic.ml.torch.train", "keras": "spark_elastic.ml.keras.engine"}
NOT_A_MEAN = {"torch": set(), "keras": {"label_sum"}}


def test_live_values_equal_those_of_the_history(framework, data, tmp_path):
    assemble = importlib.import_module(ASSEMBLE[framework.name]).assemble
    init()
    seen: list[tuple[dict[str, float], dict[str, float]]] = []
    try:
        with framework.trainings.precise():
            trainer = assemble(framework.trainings.make_training(data, tmp_path, epochs=2))
            metrics = trainer.engine.metrics
            logs = metrics.logs

            def both(sums: Any, pieces: Any, prefix: str = "") -> Any:
                out = logs(sums, pieces, prefix)
                seen.append(
                    (metrics.live_logs(sums), {name.removeprefix("val_"): value for name, value in out.items()})
                )
                return out

            metrics.logs = both
            trainer.run()
    finally:
        shutdown()
    assert len(seen) == 4
    for now, later in seen:
        assert set(now) == set(later) - NOT_A_MEAN[framework.name]
        assert now == pytest.approx({name: later[name] for name in now})

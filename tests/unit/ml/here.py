"""Estimators of either framework that train in this process, as a world of one."""

from __future__ import annotations

from typing import Any

from spark_elastic.wire.pickling import round_trip


class Here:
    """Mixed into an estimator; `training` is the settings that a worker would get."""

    fit_run: Any
    """The class of the estimator's fits."""
    training: Any

    def _fit_run(self: Any) -> Any:
        made = self.fit_run(self, self._shared_datasets)
        made._run_job = lambda: self.run_job(made.training)
        return made

    def run_job(self, training: Any) -> list[Any]:
        self.training = training
        return [self.fit_run.train_fn(round_trip(training))]

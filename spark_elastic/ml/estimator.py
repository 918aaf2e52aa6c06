"""ElasticEstimator: from a DataFrame to a trained model, whatever framework trains it. `fit.FitRun` has the steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from pyspark.ml import Estimator

from spark_elastic.data.dataset import Dataset
from spark_elastic.data.store import Store
from spark_elastic.jobs.tracking import active_run_id, fits_of
from spark_elastic.ml.datasets import SharedDatasets
from spark_elastic.ml.fit import FitRun
from spark_elastic.ml.model import ElasticModel
from spark_elastic.ml.persistence import Savable
from spark_elastic.ml.shared_params import OutputParams, TrainingParams
from spark_elastic.task.user_frames import without_own_frames

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

M = TypeVar("M", bound=ElasticModel)


def _says_all(estimator: Any, *_: Any, **__: Any) -> bool:
    return bool(estimator._given("verbose") > 1)


class ElasticEstimator(TrainingParams, OutputParams, Savable, Estimator[M]):
    """Base of the estimators: their settings, and the steps of a fit."""

    _saved_together: tuple[str, ...] = ("model", "optimizer", "lr_scheduler")
    _shared_datasets: SharedDatasets | None = None  # within `fitMultiple`: those written for the same DataFrame

    @abstractmethod
    def _fit_run(self) -> FitRun[Any, M]:
        """Return a run of the framework with these settings."""

    @overload
    def fit(self, dataset: DataFrame, params: Mapping[Any, Any] | None = None) -> M: ...

    @overload
    def fit(self, dataset: DataFrame, params: Sequence[Mapping[Any, Any]]) -> list[M]: ...

    @without_own_frames(_says_all)
    def fit(self, dataset: DataFrame, params: Any = None) -> M | list[M]:
        """Fit a model, as in Spark ML.

        Args:
            dataset: A DataFrame.
            params: Settings for this fit alone: a dict, or a list of dicts, which gives a list of models.

        Returns:
            The fitted model, or a list of them.

        Raises:
            UsageError: A setting, a column or the cluster has to be changed; no worker was started.
            JobError: The training could not continue. A `UserFunctionError` has the frames of your code.
        """
        fitted: M | list[M] = super().fit(dataset, params)
        return fitted

    def _fit(self, dataset: Any) -> M:
        with self._fit_run() as run:
            run.check(dataset)
            run.materialize()
            run.dry_run()
            run.train()
            return run.load()

    @without_own_frames(_says_all)
    def from_dataset_path(self, where: str | Path | Store | Dataset, params: Mapping[Any, Any] | None = None) -> M:
        """Fit on a dataset that `spark_elastic.materialize` wrote, with tensors "features_0", ..., "label_0", ...

        Args:
            where: The dataset's folder, or the dataset itself. It is neither changed nor removed.
            params: Settings for this fit alone, as of `fit`.

        Returns:
            The model, as `fit` does.

        Raises:
            DatasetError: There is no complete dataset, or it has other tensors than the settings require.
            InvalidSettingsError: A setting says how rows are written, but these are written already.
        """
        with (self.copy(dict(params)) if params else self)._fit_run() as run:
            run.check_stored(where)
            run.dry_run()
            run.train()
            return run.load()

    def fitMultiple(self, dataset: Any, paramMaps: Sequence[Any]) -> Iterator[tuple[int, M]]:
        """Fit once for each param map, as in Spark ML. Fits on the same columns share one written dataset."""
        estimator = self.copy()
        estimator._shared_datasets = shared = SharedDatasets(len(paramMaps))
        tracked = active_run_id()

        def fit(index: int) -> tuple[int, Any]:
            try:
                with fits_of(tracked):
                    return index, estimator.fit(dataset, paramMaps[index])
            finally:
                shared.done()

        # Several threads of a CrossValidator draw from it, which a `map` allows and a generator does not.
        return map(fit, range(len(paramMaps)))

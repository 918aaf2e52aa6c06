"""ElasticKerasEstimator: a Keras model, trained elastically on the rows of a DataFrame.

Keras is imported inside of functions, so that the class can be imported without Keras, and its constructor can say what
to install.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidSettingsError
from spark_elastic.jobs.driver_callbacks import DriverCallback
from spark_elastic.ml import params as to
from spark_elastic.ml import shared_params as shared
from spark_elastic.ml.callbacks import Callback
from spark_elastic.ml.estimator import ElasticEstimator
from spark_elastic.ml.keras.model import ElasticKerasModel
from spark_elastic.ml.keras.tensorflow_setup import check_backend
from spark_elastic.ml.params import keyword_only, same_keywords, setting
from spark_elastic.ml.saved_stage import Codec

if TYPE_CHECKING:
    import keras

    from spark_elastic.ml.keras.fit import KerasFit

    KerasLoss: TypeAlias = str | keras.Loss | Callable[..., Any]
    KerasCallback: TypeAlias = Callback | DriverCallback | keras.callbacks.Callback


class ElasticKerasEstimator(ElasticEstimator[ElasticKerasModel]):
    """Trains a `keras.Model` on a DataFrame, in workers that may join and leave; `fit` returns the trained model.

    ::

        estimator = ElasticKerasEstimator(
            model=model, optimizer=keras.optimizers.Adam(1e-3), loss="sparse_categorical_crossentropy",
            metrics=["accuracy"], feature_cols=["features"], label_cols=["label"], batch_size=1024, epochs=10,
            validation=0.1, min_num_proc=2, max_num_proc=8,
        )
        model = estimator.fit(df)

    All settings are keywords, and Params of Spark ML: `print(estimator.explainParams())` explains each. `fit` trains a
    copy of the model. If the model is compiled, its optimizer, losses and metrics are the defaults. Keras has to run on
    TensorFlow. `fit` raises an `InvalidSettingsError`, `DataError`, `StoreError` or `CheckpointError` that says what to
    change before any worker starts; a `UserFunctionError` if your code raised in a worker; and a `JobError` if the job
    could not continue.

    Args:
        model: A model; or a function, or class, that returns one, called with the shapes of the inputs (the rows are
            -1), or without arguments. Workers call it too, so Keras need not be able to save such a model.
        optimizer: As in `keras.Model.compile`; so are `loss`, `loss_weights`, `metrics` and `weighted_metrics`, with
            names, lists, and dicts by output.
        feature_cols: Columns of the inputs. A column with the name of an input goes to it, the others in the order of
            `model.inputs`; inputs of one shape in a dict need columns of their names.
        label_cols: One for each output that has a loss, in the order of `model.outputs`; for outputs in a dict, in the
            order of their names, with these names if outputs have one shape.
        callbacks: Callbacks of `spark_elastic.ml.callbacks` and of `keras.callbacks`, which run in the workers, and
            `spark_elastic.DriverCallback`, which run on the driver, in any order.
        custom_objects: Classes and functions by the names that Keras knows them by, as in `keras.saving.load_model`.
            Those that the model itself consists of need not be listed.

    Raises:
        MissingExtraError: TensorFlow is not installed.
    """

    _saved_together: tuple[str, ...] = ()

    optimizer, getOptimizer, setOptimizer = setting(
        "a keras optimizer, its name, or its configuration. Default: that of the compiled model.", to.anything
    )
    loss, getLoss, setLoss = setting(
        "as of compile: a name, a keras loss, a function of (label, output); a list, or a dict by output, of several. "
        "Default: that of the compiled model.",
        to.anything,
    )
    loss_weights, getLossWeights, setLossWeights = setting(
        "as of compile: a factor for each loss, in a list or a dict by output. Default: 1 each.", to.anything
    )
    metrics, getMetrics, setMetrics = setting(
        "as of compile: names, keras metrics and functions in a list; lists or a dict by output for several. Default: "
        "those of the compiled model.",
        to.anything,
    )
    weighted_metrics, getWeightedMetrics, setWeightedMetrics = setting(
        "as of compile: metrics in which rows count by sample_weight_col.", to.anything
    )
    callbacks, getCallbacks, setCallbacks = setting(
        "list of spark_elastic.ml.callbacks.Callback and keras.callbacks.Callback (in the workers) and "
        "spark_elastic.DriverCallback (on the driver).",
        to.anything,
    )
    custom_objects, getCustomObjects, setCustomObjects = setting(
        "dict of the names and the classes or functions of your own in the model's configuration, unless they are "
        "registered with Keras or the model consists of them.",
        to.dictionary,
    )

    @keyword_only
    def __init__(
        self,
        *,
        model: keras.Model | Callable[..., keras.Model] | None = None,
        optimizer: keras.Optimizer | str | Mapping[str, Any] | None = None,
        loss: KerasLoss | Sequence[KerasLoss | None] | Mapping[str, KerasLoss | None] | None = None,
        loss_weights: Sequence[float] | Mapping[str, float] | None = None,
        loss_is_per_worker: bool = False,
        feature_cols: str | Sequence[str] | Sequence[Sequence[str]] | None = None,
        label_cols: str | Sequence[str] | Sequence[Sequence[str]] | None = None,
        sample_weight_col: str | None = None,
        input_shapes: shared.Shapes | None = None,
        input_dtypes: shared.DType | Sequence[shared.DType | None] | None = None,
        label_shapes: shared.Shapes | None = None,
        missing: shared.Missing = "error",
        batch_size: int | None = None,
        per_worker_batch_size: int | None = None,
        epochs: int = 1,
        on_interrupt: shared.OnInterrupt = "raise",
        shuffle: bool = True,
        seed: int = 0,
        consistency: shared.Consistency = "trajectory",
        validation: float | str | None = None,
        metrics: Sequence[Any] | Mapping[str, Any] | None = None,
        weighted_metrics: Sequence[Any] | Mapping[str, Any] | None = None,
        callbacks: KerasCallback | Sequence[KerasCallback] | None = None,
        num_proc: int | None = None,
        min_num_proc: int | None = None,
        max_num_proc: int | None = None,
        device: str | None = None,
        num_threads: int | None = None,
        run_options: Mapping[str, Any] | None = None,
        verbose: int = 1,
        status_port: int | Literal["auto"] | None = "auto",
        store: str | os.PathLike[str] | Store | None = None,
        storage_options: Mapping[str, Any] | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        resume: bool = True,
        checkpoint_interval: int = 1,
        checkpoint_seconds: float | None = None,
        keep_checkpoints: int = 3,
        checkpoint_best_of: str | None = None,
        checkpoint_best_mode: shared.BestMode = "auto",
        transformation_fn: shared.ColumnsFunction | None = None,
        accumulation_steps: int = 1,
        balance: shared.Balance = "equal",
        gradient_clip_norm: float | None = None,
        gradient_clip_value: float | None = None,
        gradient_compression: shared.Compression = "none",
        sync_batch_norm: bool = True,
        allow_nan_loss: bool = False,
        dataset_id: str | None = None,
        keep_dataset: bool = False,
        data_options: Mapping[str, Any] | None = None,
        custom_objects: Mapping[str, Any] | None = None,
        output_cols: str | Sequence[str] | None = None,
        output_type: shared.OutputType = "array",
        prediction_col: str | None = "prediction",
        prediction: shared.PredictionRule = "auto",
        probability_col: str | None = "probability",
        raw_prediction_col: str | None = "rawPrediction",
        handle_invalid: shared.HandleInvalid = "error",
        inference_fn: shared.ColumnsFunction | None = None,
        transform_batch_size: int | None = None,
        transform_threads: int = 1,
        transform_device: str = "auto",
    ) -> None:
        check_backend(type(self).__name__)
        super().__init__(**self._input_kwargs)

    @same_keywords(__init__)
    def setParams(self) -> ElasticKerasEstimator:
        """Set several settings at once; takes the keywords of the constructor."""
        return self._set_given()

    @classmethod
    def _codec(cls) -> Codec:
        return ElasticKerasModel._codec()

    def _check_together(self) -> None:
        if self._given("consistency") == "exact":
            raise InvalidSettingsError(
                "consistency='exact' is for PyTorch alone; leave it out: results of ElasticKerasEstimator agree up to "
                "rounding and random numbers for any number of workers"
            )
        super()._check_together()

    def _check_loss_weights(self) -> None:
        losses, weights = self._given("loss"), self._given("loss_weights")
        if weights is None:
            return
        if isinstance(losses, (list, tuple)) and isinstance(weights, (list, tuple)) and len(losses) != len(weights):
            raise InvalidSettingsError(f"{len(weights)} loss_weights for {len(losses)} losses; give one for each")
        if isinstance(weights, Mapping) and isinstance(losses, Mapping):
            for name in weights:
                if name not in losses:
                    raise InvalidSettingsError(f"loss_weights has {name!r}, and loss has {', '.join(losses)}")

    def _fit_run(self) -> KerasFit:
        from spark_elastic.ml.keras.fit import KerasFit

        return KerasFit(self, self._shared_datasets)

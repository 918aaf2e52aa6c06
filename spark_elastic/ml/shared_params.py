"""The settings of estimators and models, grouped by subject. Frameworks add their own.

To add a setting of all estimators: declare it here, and repeat name, type and default in the signatures of
`torch.estimator` and `keras.estimator`; a test says what is missing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from pyspark.ml.param import Param

from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidSettingsError
from spark_elastic.jobs.settings import RunSettings, checked_status_port
from spark_elastic.ml import params as to
from spark_elastic.ml.params import ElasticParams, accessors, setting
from spark_elastic.settings import ScalingSettings, declarations

Shapes: TypeAlias = Sequence[int] | Sequence[Sequence[int]]
DType: TypeAlias = str | type | np.dtype[Any]
ColumnsFunction: TypeAlias = Callable[[dict[str, Any]], Mapping[str, Any]]
Compression: TypeAlias = Literal["none", "fp16", "bf16"]
Consistency: TypeAlias = Literal["trajectory", "exact"]
BestMode: TypeAlias = Literal["auto", "min", "max"]
OutputType: TypeAlias = Literal["array", "vector"]
HandleInvalid: TypeAlias = Literal["error", "skip", "keep"]
PredictionRule: TypeAlias = Literal[
    "auto", "argmax", "value", "binary_logit", "binary_probability", "argmax_probability"
]

_OWN_SETTINGS = (
    *("num_proc", "min_num_proc", "max_num_proc", "verbose", "status_port", "device", "spark", "callbacks"),
    *("checkpoint_dir", "run_id"),
)
RUN_OPTIONS = tuple(each.name for each in declarations(RunSettings) if each.name not in _OWN_SETTINGS)
"""The arguments of `spark_elastic.run` that are not settings of the estimators themselves."""

WRITE_OPTIONS = ("pad_to", "variable", "sparse", "allow_nan", "shard_bytes", "pre_shuffle")
READ_OPTIONS = ("order", "prefetch", "cache_dir", "cache_bytes")
"""Arguments of `materialize` (WRITE_OPTIONS) and `BatchReader` (READ_OPTIONS) that are not settings themselves."""


class FeatureColumns(ElasticParams):
    """The inputs of the model."""

    feature_cols: Param[str | Sequence[str] | Sequence[Sequence[str]] | None] = setting(
        "columns that are the model's input. Scalar columns are stacked into one input [rows, columns]; with arrays "
        "or vectors among them, each column is an input. A list of lists: an input for each inner list.",
        to.grouped_names,
    )
    getFeatureCols, setFeatureCols = accessors(feature_cols)


class FeatureParams(FeatureColumns):
    """The inputs of the model."""

    input_shapes: Param[Shapes | None] = setting(
        "shape of one row of each input, such as [(1, 28, 28)]. Default: as in its column; [] for a single column of "
        "integers.",
        to.shapes,
    )
    getInputShapes, setInputShapes = accessors(input_shapes)
    input_dtypes: Param[DType | Sequence[DType | None] | None] = setting(
        "numpy type of each input, such as ['int64', None]. Default, and None: int64 for a single integer column and "
        "for an inner list of such columns, else float32. Integers that a type would round are refused.",
        to.dtypes,
    )
    getInputDtypes, setInputDtypes = accessors(input_dtypes)


class LabelParams(ElasticParams):
    """Labels, weights and validation."""

    label_cols: Param[str | Sequence[str] | None] = setting(
        "columns that are compared with the model's outputs; [] if train_fn needs none.", to.names_or_none
    )
    getLabelCols, setLabelCols = accessors(label_cols)
    label_shapes: Param[Shapes | None] = setting(
        "shape of one row of each label. Default: as in its column.", to.shapes
    )
    getLabelShapes, setLabelShapes = accessors(label_shapes)
    sample_weight_col: Param[str | None] = setting("column with the weight of each row in the loss.", to.text)
    getSampleWeightCol, setSampleWeightCol = accessors(sample_weight_col)
    validation: Param[float | str | None] = setting(
        "rows for validation: a fraction, drawn with the seed, or the name of a boolean column. Default: none.",
        to.fraction_or_column,
    )
    getValidation, setValidation = accessors(validation)


class ModelParams(ElasticParams):
    """The model, its loss and metrics."""

    model: Param[Any] = setting("the model; fit trains a copy of it.", to.anything)
    getModel, setModel = accessors(model)
    optimizer: Param[Any] = setting("the optimizer.", to.anything)
    getOptimizer, setOptimizer = accessors(optimizer)
    loss: Param[Any] = setting("the loss, or a list with one for each label.", to.anything)
    getLoss, setLoss = accessors(loss)
    loss_weights: Param[Any] = setting(
        "factor of each of several losses in their sum. Default: 1 each.", to.numbers_list
    )
    getLossWeights, setLossWeights = accessors(loss_weights)
    loss_is_per_worker: Param[bool] = setting(
        "take a loss that is no mean over rows, averaged over the workers' shares of a batch; the result then depends "
        "on their number. False: such a loss is refused before workers start.",
        to.boolean,
        default=False,
    )
    getLossIsPerWorker, setLossIsPerWorker = accessors(loss_is_per_worker)
    metrics: Param[Any] = setting("a dict of name and metric, reported for each epoch.", to.dictionary)
    getMetrics, setMetrics = accessors(metrics)
    callbacks: Param[Any] = setting(
        "list of spark_elastic.ml.callbacks.Callback (in the workers) and spark_elastic.DriverCallback (on the "
        "driver).",
        to.anything,
    )
    getCallbacks, setCallbacks = accessors(callbacks)

    def _check_together(self) -> None:
        super()._check_together()
        self._check_loss_weights()

    def _check_loss_weights(self) -> None:
        losses, weights = self._given("loss"), self._given("loss_weights")
        count = len(losses) if isinstance(losses, (list, tuple)) else None if losses is None else 1
        if weights is not None and count is not None and count != len(weights):
            raise InvalidSettingsError(f"{len(weights)} loss_weights for {count} losses; give one for each")


def _consistency(name: str, value: Any) -> str:
    if value == "off":
        raise InvalidSettingsError(
            "consistency='off' does not exist: the batches of 'trajectory' are the same for any number of workers at "
            "no extra cost. For batches that grow with the workers, set per_worker_batch_size"
        )
    return str(to.one_of(*get_args(Consistency))(name, value))


class BatchParams(ElasticParams):
    """Batches, epochs and the order of the rows."""

    batch_size: Param[int | None] = setting(
        "rows of a global batch, which all workers together take in a step. Default: 32, unless per_worker_batch_size "
        "is set.",
        to.whole(at_least=1),
    )
    getBatchSize, setBatchSize = accessors(batch_size)
    per_worker_batch_size: Param[int | None] = setting(
        "rows that each worker takes in a step, instead of batch_size: the global batch, and the result, change with "
        "the world.",
        to.whole(at_least=1),
    )
    getPerWorkerBatchSize, setPerWorkerBatchSize = accessors(per_worker_batch_size)
    epochs: Param[int] = setting("passes over the training rows.", to.whole(at_least=1), default=1)
    getEpochs, setEpochs = accessors(epochs)
    shuffle: Param[bool] = setting("read the rows of each epoch in another random order.", to.boolean, default=True)
    getShuffle, setShuffle = accessors(shuffle)
    seed: Param[int] = setting(
        "seed of the row order, of the validation split, and, with epoch, batch and rank, of random numbers such as "
        "dropout's.",
        to.whole(at_least=0),
        default=0,
    )
    getSeed, setSeed = accessors(seed)
    consistency: Param[Consistency] = setting(
        "'trajectory': the same batches for any number of workers, and results that are equal up to rounding and "
        "random numbers. 'exact' (PyTorch): the same bits, in slower steps; see virtual_workers.",
        _consistency,
        default="trajectory",
    )
    getConsistency, setConsistency = accessors(consistency)
    transformation_fn: Param[ColumnsFunction | None] = setting(
        "function of a batch's columns, {'features_0': array, 'label_0': array, ...}, to those to train and validate "
        "on, with as many rows. For the fitted model: inference_fn.",
        to.function,
    )
    getTransformationFn, setTransformationFn = accessors(transformation_fn)
    accumulation_steps: Param[int] = setting(
        "parts that each worker cuts its share of a batch into, to save memory. The gradient is that of the whole "
        "batch.",
        to.whole(at_least=1),
        default=1,
    )
    getAccumulationSteps, setAccumulationSteps = accessors(accumulation_steps)

    def _check_together(self) -> None:
        super()._check_together()
        if self._given("batch_size") and self._given("per_worker_batch_size"):
            raise InvalidSettingsError(
                f"batch_size={self._given('batch_size')} (of all workers together) and per_worker_batch_size="
                f"{self._given('per_worker_batch_size')} contradict each other; set one of them to None"
            )


class GradientParams(ElasticParams):
    """Gradients and normalisation."""

    gradient_clip_norm: Param[float | None] = setting(
        "largest global norm of the gradients, which are scaled down to it.", to.real(above=0)
    )
    getGradientClipNorm, setGradientClipNorm = accessors(gradient_clip_norm)
    gradient_clip_value: Param[float | None] = setting(
        "largest absolute value of each gradient, which is clipped to it.", to.real(above=0)
    )
    getGradientClipValue, setGradientClipValue = accessors(gradient_clip_value)
    gradient_compression: Param[Compression] = setting(
        "'fp16' or 'bf16': send gradients in half precision; 'none': as they are.",
        to.one_of(*get_args(Compression)),
        default="none",
    )
    getGradientCompression, setGradientCompression = accessors(gradient_compression)
    sync_batch_norm: Param[bool] = setting(
        "compute batch normalisation over all workers' rows of a batch, so that the number of workers does not "
        "matter. False: over each worker's own rows.",
        to.boolean,
        default=True,
    )
    getSyncBatchNorm, setSyncBatchNorm = accessors(sync_batch_norm)
    allow_nan_loss: Param[bool] = setting(
        "continue when the loss of a step is NaN or infinite; otherwise fit raises a LossNotFiniteError.",
        to.boolean,
        default=False,
    )
    getAllowNanLoss, setAllowNanLoss = accessors(allow_nan_loss)


class ClusterParams(ElasticParams):
    """Workers, elasticity and printed progress."""

    num_proc: Param[int | None] = setting(
        "workers to start with. Default: the task slots of the cluster.", to.whole(at_least=1)
    )
    getNumProc, setNumProc = accessors(num_proc)
    min_num_proc: Param[int | None] = setting(
        "fewest workers to continue with. Default: num_proc.", to.whole(at_least=1)
    )
    getMinNumProc, setMinNumProc = accessors(min_num_proc)
    max_num_proc: Param[int | None] = setting("most workers to grow to. Default: num_proc.", to.whole(at_least=1))
    getMaxNumProc, setMaxNumProc = accessors(max_num_proc)
    device: Param[str | None] = setting(
        "device to train on: 'auto', 'cpu', 'cuda', 'cuda:0', ... Default, and 'auto': cuda where a worker has it.",
        to.text,
    )
    getDevice, setDevice = accessors(device)
    num_threads: Param[int | None] = setting(
        "the framework's threads in each worker. Default: the workers of a host share its cores.", to.whole(1)
    )
    getNumThreads, setNumThreads = accessors(num_threads)
    run_options: Param[Mapping[str, Any] | None] = setting(
        f"dict of further arguments of spark_elastic.run: {', '.join(RUN_OPTIONS)}.", to.options(RUN_OPTIONS)
    )
    getRunOptions, setRunOptions = accessors(run_options)
    verbose: Param[int] = setting(
        "0: quiet, 1: a line for each epoch and change of the workers, and a bar in a terminal or a notebook, 2: each "
        "step of them.",
        to.whole(at_least=0),
        default=1,
    )
    getVerbose, setVerbose = accessors(verbose)
    status_port: Param[int | Literal["auto"] | None] = setting(
        'port of the status page; 0: any free one; None: no page. "auto": any free one, if all workers run on the '
        "driver's machine and verbose is not 0.",
        lambda name, value: None if value is None else checked_status_port(name, value),
        default="auto",
    )
    getStatusPort, setStatusPort = accessors(status_port)

    def _check_together(self) -> None:
        super()._check_together()
        ScalingSettings(**{name: self._given(name) for name in ("min_num_proc", "num_proc", "max_num_proc")})


class StorageParams(ElasticParams):
    """Storage of the rows and results."""

    store: Param[str | os.PathLike[str] | Store | None] = setting(
        "path, URI or spark_elastic.Store for rows and results, which driver and executors share. Default: a "
        "temporary directory, for executors on the driver's machine.",
        to.location,
    )
    getStore, setStore = accessors(store)
    storage_options: Param[Mapping[str, Any] | None] = setting(
        "options of the filesystem of a URI, such as credentials. Not saved with an estimator.",
        to.dictionary,
    )
    getStorageOptions, setStorageOptions = accessors(storage_options)
    dataset_id: Param[str | None] = setting(
        "name by which later fits find the written rows again, unchecked. Default: each fit writes its rows.",
        to.text,
    )
    getDatasetId, setDatasetId = accessors(dataset_id)
    keep_dataset: Param[bool] = setting(
        "keep the written rows after the fit, for from_dataset_path; a dataset_id keeps them too.",
        to.boolean,
        default=False,
    )
    getKeepDataset, setKeepDataset = accessors(keep_dataset)
    data_options: Param[Mapping[str, Any] | None] = setting(
        f"dict of further arguments of spark_elastic.materialize ({', '.join(WRITE_OPTIONS)}; tensors are called "
        f"features_0, label_0, ...) and of spark_elastic.BatchReader ({', '.join(READ_OPTIONS)}).",
        to.options((*WRITE_OPTIONS, *READ_OPTIONS)),
    )
    getDataOptions, setDataOptions = accessors(data_options)


class CheckpointParams(ElasticParams):
    """Checkpoints, and resuming from them."""

    checkpoint_dir: Param[str | os.PathLike[str] | None] = setting(
        "shared path or URI for durable checkpoints. Default: none are written.", to.path
    )
    getCheckpointDir, setCheckpointDir = accessors(checkpoint_dir)
    checkpoint_interval: Param[int] = setting("epochs between two checkpoints.", to.whole(at_least=1), default=1)
    getCheckpointInterval, setCheckpointInterval = accessors(checkpoint_interval)
    checkpoint_seconds: Param[float | None] = setting(
        "also write one when this many seconds have passed since the last.", to.real(above=0)
    )
    getCheckpointSeconds, setCheckpointSeconds = accessors(checkpoint_seconds)
    checkpoint_best_of: Param[str | None] = setting(
        "column of the history, such as 'val_loss', by which the best epoch's checkpoint is kept, too. Default: none.",
        to.text,
    )
    getCheckpointBestOf, setCheckpointBestOf = accessors(checkpoint_best_of)
    checkpoint_best_mode: Param[BestMode] = setting(
        "'min', 'max', or 'auto': the smallest value is best for names of losses and errors, else the largest.",
        to.one_of(*get_args(BestMode)),
        default="auto",
    )
    getCheckpointBestMode, setCheckpointBestMode = accessors(checkpoint_best_mode)
    keep_checkpoints: Param[int] = setting(
        "how many of the last checkpoints are kept.", to.whole(at_least=1), default=3
    )
    getKeepCheckpoints, setKeepCheckpoints = accessors(keep_checkpoints)
    run_id: Param[str | None] = setting(
        "name of this training below checkpoint_dir: fit resumes from its last checkpoint.",
        to.identifier,
    )
    getRunId, setRunId = accessors(run_id)
    resume: Param[bool] = setting(
        "resume from the checkpoints of run_id; False deletes them and starts over.", to.boolean, default=True
    )
    getResume, setResume = accessors(resume)

    def _check_together(self) -> None:
        super()._check_together()
        if self._given("run_id") is not None and self._given("checkpoint_dir") is None:
            raise InvalidSettingsError(
                f"run_id={self._given('run_id')!r} without checkpoint_dir: there is nothing to resume from; set both"
            )
        if self._given("checkpoint_dir") is None:
            plan = ("interval", "seconds", "best_of", "best_mode")
            for name in (*(f"checkpoint_{each}" for each in plan), "keep_checkpoints"):
                if self._is_given(name):
                    raise InvalidSettingsError(
                        f"{name}={self._given(name)!r} without checkpoint_dir: no checkpoints are written; set both"
                    )
        if self._given("checkpoint_best_of") is None and self.isSet("checkpoint_best_mode"):
            raise InvalidSettingsError(
                "checkpoint_best_mode is set without checkpoint_best_of; set the column of the history, too"
            )
        if not self._given("resume") and self._given("run_id") is None:
            raise InvalidSettingsError(
                "resume=False without run_id: there is no earlier run to start over; set run_id, too, or leave "
                "out resume"
            )


class TrainingParams(
    ModelParams, FeatureParams, LabelParams, BatchParams, GradientParams, ClusterParams, CheckpointParams, StorageParams
):
    """The settings of a fit."""


class OutputParams(ElasticParams):
    """Output: the columns that `transform` adds."""

    output_cols: Param[str | Sequence[str] | None] = setting(
        "names of the columns with the model's outputs: a double or integer if there is one value per row, an array "
        "otherwise. []: none. Default: 'output', or 'output_0', 'output_1', ...",
        to.names_or_none,
    )
    getOutputCols, setOutputCols = accessors(output_cols)
    output_type: Param[OutputType] = setting(
        "'array', or 'vector': outputs of one axis become Spark ML vectors, as its evaluators need them.",
        to.one_of(*get_args(OutputType)),
        default="array",
    )
    getOutputType, setOutputType = accessors(output_type)
    prediction_col: Param[str] = setting(
        "name of the double column with the prediction from the first output; '' for none.",
        lambda name, value: "" if value is None or value == "" else to.text(name, value),
        default="prediction",
    )
    getPredictionCol, setPredictionCol = accessors(prediction_col)
    prediction: Param[PredictionRule] = setting(
        "rule for the prediction from the first output: 'argmax' of its values, 'argmax_probability' of "
        "probabilities, the 'value' itself, 'binary_logit': 1 if above 0, 'binary_probability': 1 if above 0.5. "
        "'auto': the rule of the loss, or the value if there is one per row, or no prediction.",
        to.one_of(*get_args(PredictionRule)),
        default="auto",
    )
    getPrediction, setPrediction = accessors(prediction)
    probability_col: Param[str | None] = setting(
        "name of a vector column with the probability of each class (softmax or sigmoid of the first output, unless "
        "it has probabilities). Default: none.",
        to.text,
    )
    getProbabilityCol, setProbabilityCol = accessors(probability_col)
    raw_prediction_col: Param[str | None] = setting(
        "name of a vector column with the score of each class, for BinaryClassificationEvaluator: the first output, "
        "or of one value per row [-z, z] of a logit, [1 - p, p] of a probability. Default: none.",
        to.text,
    )
    getRawPredictionCol, setRawPredictionCol = accessors(raw_prediction_col)
    handle_invalid: Param[HandleInvalid] = setting(
        "treatment by transform of rows with a null in the input, NaN or infinity where fit refuses them, or a NaN "
        "output of which no class can be made: 'error', 'skip' (leave them out) or 'keep' (all added columns are "
        "null).",
        to.one_of(*get_args(HandleInvalid)),
        default="error",
    )
    getHandleInvalid, setHandleInvalid = accessors(handle_invalid)
    inference_fn: Param[ColumnsFunction | None] = setting(
        "function of a batch's features, {'features_0': array, ...}, to the model's inputs, in their order; the "
        "counterpart of transformation_fn. Default: none.",
        to.function,
    )
    getInferenceFn, setInferenceFn = accessors(inference_fn)
    transform_batch_size: Param[int | None] = setting(
        "rows that transform puts through the model at once. Default: 512 for PyTorch on the CPU, otherwise 4,096.",
        to.whole(at_least=1),
    )
    getTransformBatchSize, setTransformBatchSize = accessors(transform_batch_size)
    transform_threads: Param[int] = setting("threads of each Python worker in transform.", to.whole(at_least=1), 1)
    getTransformThreads, setTransformThreads = accessors(transform_threads)
    transform_device: Param[str] = setting(
        "device of the model in transform: 'cpu', 'cuda', 'cuda:0', ...", to.text, "cpu"
    )
    getTransformDevice, setTransformDevice = accessors(transform_device)

    def _check_together(self) -> None:
        super()._check_together()
        added = [
            *(self._given("output_cols") or []),
            *filter(None, [self._given(f"{each}_col") for each in ("prediction", "probability", "raw_prediction")]),
        ]
        for name in added:
            if added.count(name) > 1:
                raise InvalidSettingsError(
                    f"{name!r} would be {added.count(name)} of the output columns; give output_cols, prediction_col, "
                    "probability_col and raw_prediction_col different names"
                )

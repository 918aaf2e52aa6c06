"""The settings of estimators and models, grouped by subject. Frameworks add their own.

To add a setting of all estimators: declare it here, and repeat name, type and default in the signatures of
`torch.estimator` and `keras.estimator`; a test says what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from spark_elastic.errors import InvalidSettingsError
from spark_elastic.jobs.settings import RunSettings, checked_status_port
from spark_elastic.ml import params as to
from spark_elastic.ml.params import ElasticParams, setting
from spark_elastic.runs.folder import check_run_id
from spark_elastic.settings import ScalingSettings, declarations

Missing: TypeAlias = Literal["error", "skip"] | float
Shapes: TypeAlias = Sequence[int] | Sequence[Sequence[int] | None]
DType: TypeAlias = str | type | np.dtype[Any]
ColumnsFunction: TypeAlias = Callable[[dict[str, Any]], Mapping[str, Any]]
Compression: TypeAlias = Literal["none", "fp16", "bf16"]
Balance: TypeAlias = Literal["auto", "equal"]
Consistency: TypeAlias = Literal["trajectory", "exact"]
OnInterrupt: TypeAlias = Literal["raise", "return"]
BestMode: TypeAlias = Literal["auto", "min", "max"]
OutputType: TypeAlias = Literal["array", "vector"]
HandleInvalid: TypeAlias = Literal["error", "skip", "keep"]
PredictionRule: TypeAlias = Literal[
    "auto", "argmax", "value", "sign", "binary_logit", "binary_probability", "argmax_probability"
]

_OWN_SETTINGS = (
    *("num_proc", "min_num_proc", "max_num_proc", "verbose", "status_port", "device", "spark", "callbacks"),
    *("checkpoint_dir", "run_id", "restart", "restart_interval"),
)
RUN_OPTIONS = tuple(each.name for each in declarations(RunSettings) if each.name not in _OWN_SETTINGS)
"""The arguments of `spark_elastic.run` that are not settings of the estimators themselves."""

WRITE_OPTIONS = ("pad_to", "variable", "sparse", "allow_nan", "shard_bytes", "pre_shuffle")
NOTHING_ADDED = (
    "transform has nothing to add: output_cols is [], and there is no prediction_col, probability_col or "
    "raw_prediction_col"
)
OF_CLASSES = ("probability", "raw_prediction")  # columns that are made by default where the prediction is a class
READ_OPTIONS = ("order", "prefetch", "cache_dir", "cache_bytes")
"""Arguments of `materialize` (WRITE_OPTIONS) and `BatchReader` (READ_OPTIONS) that are not settings themselves."""


class FeatureColumns(ElasticParams):
    """The inputs of the model."""

    feature_cols, getFeatureCols, setFeatureCols = setting(
        "columns that are the model's input. Scalar columns are stacked into one input [rows, columns]; with arrays "
        "or vectors among them, each column is an input. A list of lists: an input for each inner list.",
        to.grouped_names,
    )


class FeatureParams(FeatureColumns):
    """The inputs of the model."""

    input_shapes, getInputShapes, setInputShapes = setting(
        "shape of one row of each input, such as [(1, 28, 28), None]. Default, and None: as in its column; [] for a "
        "single column of integers. Binary columns need it, and are uint8.",
        to.shapes,
    )
    input_dtypes, getInputDtypes, setInputDtypes = setting(
        "numpy type of each input, such as ['int64', None]. Default, and None: int64 for a single integer column and "
        "for an inner list of such columns, else float32. Integers that a type would round are refused.",
        to.dtypes,
    )


class LabelParams(ElasticParams):
    """Labels, weights and validation."""

    label_cols, getLabelCols, setLabelCols = setting(
        "columns that are compared with the model's outputs, each a label; an inner list is one label [rows, columns]. "
        "[] if train_fn needs none.",
        to.grouped_names_or_none,
    )
    label_shapes, getLabelShapes, setLabelShapes = setting(
        "shape of one row of each label. Default: as in its column.", to.shapes
    )
    missing, getMissing, setMissing = setting(
        "treatment by fit of nulls, NaN and infinity: 'error', 'skip' (leave out the row), or a number that replaces "
        "them in inputs, in transform too.",
        to.missing,
        default="error",
    )
    sample_weight_col, getSampleWeightCol, setSampleWeightCol = setting(
        "column with the weight of each row in the loss.", to.text
    )
    validation, getValidation, setValidation = setting(
        "rows for validation: a fraction, drawn with the seed, or the name of a boolean column.", to.fraction_or_column
    )


class ModelParams(ElasticParams):
    """The model, its loss and metrics."""

    model, getModel, setModel = setting("the model, or a function that makes it.", to.anything)
    optimizer, getOptimizer, setOptimizer = setting("the optimizer.", to.anything)
    loss, getLoss, setLoss = setting("the loss, or a list with one for each label.", to.anything)
    loss_weights, getLossWeights, setLossWeights = setting(
        "factor of each of several losses in their sum. Default: 1 each.", to.numbers_list
    )
    loss_is_per_worker, getLossIsPerWorker, setLossIsPerWorker = setting(
        "take a loss that is no mean over rows, averaged over the workers' shares of a batch, so that their number "
        "matters. False: it is refused.",
        to.boolean,
        default=False,
    )
    metrics, getMetrics, setMetrics = setting("a dict of name and metric, reported for each epoch.", to.dictionary)
    callbacks, getCallbacks, setCallbacks = setting(
        "list of spark_elastic.ml.callbacks.Callback (in the workers) and spark_elastic.DriverCallback (on the "
        "driver).",
        to.anything,
    )

    def _check_together(self) -> None:
        super()._check_together()
        self._check_loss_weights()

    def _check_loss_weights(self) -> None:
        losses, weights = self._given("loss"), self._given("loss_weights")
        count = len(losses) if isinstance(losses, (list, tuple)) else None if losses is None else 1
        if weights is not None and count is not None and count != len(weights):
            raise InvalidSettingsError(f"{len(weights)} loss_weights for {count} losses; give one for each")


class BatchParams(ElasticParams):
    """Batches, epochs and the order of the rows."""

    batch_size, getBatchSize, setBatchSize = setting(
        "rows of a global batch, which all workers together take in a step. Default: 32, unless per_worker_batch_size "
        "is set.",
        to.whole(at_least=1),
    )
    per_worker_batch_size, getPerWorkerBatchSize, setPerWorkerBatchSize = setting(
        "rows that each worker takes in a step, instead of batch_size: the global batch, and the result, change with "
        "the world.",
        to.whole(at_least=1),
    )
    epochs, getEpochs, setEpochs = setting("passes over the training rows.", to.whole(at_least=1), default=1)
    on_interrupt, getOnInterrupt, setOnInterrupt = setting(
        "effect of Ctrl-C while workers train: 'raise' a KeyboardInterrupt, or 'return' the model after the running "
        "epoch, unless it is pressed again.",
        to.one_of(*get_args(OnInterrupt)),
        default="raise",
    )
    shuffle, getShuffle, setShuffle = setting(
        "read the rows of each epoch in another random order.", to.boolean, default=True
    )
    seed, getSeed, setSeed = setting(
        "seed of the row order, of the validation split, and, with epoch, batch and rank, of random numbers such as "
        "dropout's.",
        to.whole(at_least=0),
        default=0,
    )
    consistency, getConsistency, setConsistency = setting(
        "'trajectory': the same batches for any number of workers, and results that are equal up to rounding and "
        "random numbers. 'exact' (PyTorch): the same bits, in slower steps; see virtual_workers.",
        to.one_of(*get_args(Consistency), hint="; for batches that grow with the workers, set per_worker_batch_size"),
        default="trajectory",
    )
    balance, getBalance, setBalance = setting(
        "'auto': slower workers get fewer rows of each batch, by the times of their steps; 'equal': all get as many.",
        to.one_of(*get_args(Balance)),
        default="equal",
    )
    transformation_fn, getTransformationFn, setTransformationFn = setting(
        "function of a batch's columns, {'features_0': array, 'label_0': array, ...}, to those to train and validate "
        "on, with as many rows. For the fitted model: inference_fn.",
        to.function,
    )
    accumulation_steps, getAccumulationSteps, setAccumulationSteps = setting(
        "parts that each worker cuts its share of a batch into, to save memory. The gradient is that of the whole "
        "batch.",
        to.whole(at_least=1),
        default=1,
    )

    def _check_together(self) -> None:
        super()._check_together()
        if self._given("batch_size") and self._given("per_worker_batch_size"):
            raise InvalidSettingsError(
                f"batch_size={self._given('batch_size')} (of all workers together) and per_worker_batch_size="
                f"{self._given('per_worker_batch_size')} contradict each other; set one of them to None"
            )


class GradientParams(ElasticParams):
    """Gradients and normalisation."""

    gradient_clip_norm, getGradientClipNorm, setGradientClipNorm = setting(
        "largest global norm of the gradients, which are scaled down to it.", to.real(above=0)
    )
    gradient_clip_value, getGradientClipValue, setGradientClipValue = setting(
        "largest absolute value of each gradient, which is clipped to it.", to.real(above=0)
    )
    gradient_compression, getGradientCompression, setGradientCompression = setting(
        "'fp16' or 'bf16': send gradients in half precision; 'none': as they are.",
        to.one_of(*get_args(Compression)),
        default="none",
    )
    sync_batch_norm, getSyncBatchNorm, setSyncBatchNorm = setting(
        "batch normalisation over all workers' rows of a batch; False: over each worker's own.",
        to.boolean,
        default=True,
    )
    allow_nan_loss, getAllowNanLoss, setAllowNanLoss = setting(
        "continue when the loss of a step is NaN or infinite; otherwise fit raises a LossNotFiniteError.",
        to.boolean,
        default=False,
    )


class ClusterParams(ElasticParams):
    """Workers, elasticity and printed progress."""

    num_proc, getNumProc, setNumProc = setting(
        "workers to start with. Default: the task slots, or the bounds of dynamic allocation.", to.whole(at_least=1)
    )
    min_num_proc, getMinNumProc, setMinNumProc = setting(
        "fewest workers to continue with. Default: num_proc.", to.whole(at_least=1)
    )
    max_num_proc, getMaxNumProc, setMaxNumProc = setting(
        "most workers to grow to. Default: num_proc.", to.whole(at_least=1)
    )
    device, getDevice, setDevice = setting(
        "device to train on: 'auto', 'cpu', 'cuda', 'cuda:0', ... Default, and 'auto': cuda where a worker has it.",
        to.text,
    )
    num_threads, getNumThreads, setNumThreads = setting(
        "the framework's threads in each worker. Default: the workers of a host share its cores.", to.whole(1)
    )
    run_options, getRunOptions, setRunOptions = setting(
        f"dict of further arguments of spark_elastic.run: {', '.join(RUN_OPTIONS)}.", to.options(RUN_OPTIONS)
    )
    verbose, getVerbose, setVerbose = setting(
        "0: quiet, 1: a line for each epoch and change of the workers, and a bar in a terminal or a notebook, 2: each "
        "step of them.",
        to.whole(at_least=0),
        default=1,
    )
    status_port, getStatusPort, setStatusPort = setting(
        'port of the status page; 0: any free one; None: no page. "auto": any free one, if all workers run on the '
        "driver's machine and verbose is not 0.",
        lambda name, value: None if value is None else checked_status_port(name, value),
        default="auto",
    )

    def _check_together(self) -> None:
        super()._check_together()
        ScalingSettings(**{name: self._given(name) for name in ("min_num_proc", "num_proc", "max_num_proc")})


class StorageParams(ElasticParams):
    """Storage of the rows and results."""

    store, getStore, setStore = setting(
        "path, URI or spark_elastic.Store for rows and results, which driver and executors share. Default: a "
        "temporary directory, for executors on the driver's machine.",
        to.location,
    )
    storage_options, getStorageOptions, setStorageOptions = setting(
        "options of the filesystem of a URI, such as credentials.", to.dictionary
    )
    dataset_id, getDatasetId, setDatasetId = setting(
        "name by which later fits find the written rows again, unchecked. Default: each fit writes its rows.", to.text
    )
    keep_dataset, getKeepDataset, setKeepDataset = setting(
        "keep the written rows after the fit, for from_dataset_path; a dataset_id keeps them too.",
        to.boolean,
        default=False,
    )
    data_options, getDataOptions, setDataOptions = setting(
        f"dict of further arguments of spark_elastic.materialize ({', '.join(WRITE_OPTIONS)}; tensors are called "
        f"features_0, label_0, ...) and of spark_elastic.BatchReader ({', '.join(READ_OPTIONS)}).",
        to.options((*WRITE_OPTIONS, *READ_OPTIONS)),
    )


class CheckpointParams(ElasticParams):
    """Checkpoints, and resuming from them."""

    checkpoint_dir, getCheckpointDir, setCheckpointDir = setting("shared path or URI for durable checkpoints.", to.path)
    checkpoint_interval, getCheckpointInterval, setCheckpointInterval = setting(
        "epochs between two checkpoints.", to.whole(at_least=1), default=1
    )
    checkpoint_seconds, getCheckpointSeconds, setCheckpointSeconds = setting(
        "also write one when this many seconds have passed since the last.", to.real(above=0)
    )
    checkpoint_best_of, getCheckpointBestOf, setCheckpointBestOf = setting(
        "column of the history, such as 'val_loss', by which the best epoch's checkpoint is kept, too. Default: none.",
        to.text,
    )
    checkpoint_best_mode, getCheckpointBestMode, setCheckpointBestMode = setting(
        "'min', 'max', or 'auto': the smallest value is best for names of losses and errors, else the largest.",
        to.one_of(*get_args(BestMode)),
        default="auto",
    )
    keep_checkpoints, getKeepCheckpoints, setKeepCheckpoints = setting(
        "how many of the last checkpoints are kept.", to.whole(at_least=1), default=3
    )
    run_id, getRunId, setRunId = setting(
        "name of this training below checkpoint_dir: fit resumes from its last checkpoint.", to.identifier
    )
    resume, getResume, setResume = setting(
        "resume from the checkpoints of run_id; False deletes them and starts over.", to.boolean, default=True
    )

    def _check_together(self) -> None:
        super()._check_together()
        check_run_id(self._given("run_id"), self._given("checkpoint_dir"))
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

    output_cols, getOutputCols, setOutputCols = setting(
        "names of the columns with the model's outputs: a double or integer for an output [rows], an array "
        "otherwise. []: none. Default: 'output', or 'output_0', 'output_1', ...",
        to.names_or_none,
    )
    output_type, getOutputType, setOutputType = setting(
        "'array', or 'vector': outputs of one axis become Spark ML vectors.",
        to.one_of(*get_args(OutputType)),
        default="array",
    )
    prediction_col, getPredictionCol, setPredictionCol = setting(
        "name of the double column with the prediction from the first output; None for none.",
        to.text_or_none,
        default="prediction",
    )
    prediction, getPrediction, setPrediction = setting(
        "rule for the prediction from the first output: 'argmax', 'argmax_probability' (of probabilities), 'value', "
        "'sign' (-1 or 1), 'binary_logit' (1 above 0) or 'binary_probability' (1 above 0.5). 'auto': that of the loss, "
        "or the value if there is one per row, or none.",
        to.one_of(*get_args(PredictionRule)),
        default="auto",
    )
    probability_col, getProbabilityCol, setProbabilityCol = setting(
        "name of the vector column with the probability of each class, where the prediction is one: softmax or "
        "sigmoid of the first output, unless it has probabilities. None for none.",
        to.text_or_none,
        default="probability",
    )
    raw_prediction_col, getRawPredictionCol, setRawPredictionCol = setting(
        "name of the vector column with the score of each class, where the prediction is one: the first output, or "
        "[-z, z] of a logit, [1 - p, p] of a probability. None for none.",
        to.text_or_none,
        default="rawPrediction",
    )
    handle_invalid, getHandleInvalid, setHandleInvalid = setting(
        "treatment by transform of rows with a null in the input, NaN or infinity where fit refuses them, or a NaN "
        "output without a class: 'error', 'skip' (leave them out) or 'keep' (all added columns are null).",
        to.one_of(*get_args(HandleInvalid)),
        default="error",
    )
    inference_fn, getInferenceFn, setInferenceFn = setting(
        "function of a batch's features, {'features_0': array, ...}, to the model's inputs, in their order; the "
        "counterpart of transformation_fn. Default: none.",
        to.function,
    )
    transform_batch_size, getTransformBatchSize, setTransformBatchSize = setting(
        "rows that transform puts through the model at once. Default: 512 for PyTorch on the CPU, otherwise 4,096; at "
        "most 64 MiB.",
        to.whole(at_least=1),
    )
    transform_threads, getTransformThreads, setTransformThreads = setting(
        "threads of each Python worker in transform.", to.whole(at_least=1), 1
    )
    transform_device, getTransformDevice, setTransformDevice = setting(
        "device of the model in transform: 'cpu', 'cuda:0', ...; 'cuda': the task's GPU; 'auto': that, else the CPU.",
        to.text,
        "auto",
    )

    def _check_together(self) -> None:
        super()._check_together()
        outputs, of_classes = self._given("output_cols") or [], [f"{each}_col" for each in OF_CLASSES]
        named = [each for each in of_classes if self.isSet(each) or self._given(each) not in outputs]
        added = [*outputs, *filter(None, map(self._given, ["prediction_col", *named]))]
        if not added and self._given("output_cols") is not None:
            raise InvalidSettingsError(NOTHING_ADDED)
        if repeated := [name for name in added if added.count(name) > 1]:
            raise InvalidSettingsError(
                f"{repeated[0]!r} would be {added.count(repeated[0])} of the output columns; give output_cols, "
                "prediction_col, probability_col and raw_prediction_col different names, or None"
            )

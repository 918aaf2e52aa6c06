"""The settings of estimators and models, by what they are about. Frameworks add theirs on top."""

from __future__ import annotations

from typing import Any

from spark_elastic.errors import InvalidSettingsError
from spark_elastic.jobs.settings import RunSettings
from spark_elastic.ml import params as to
from spark_elastic.ml.params import ElasticParams, setting
from spark_elastic.settings import declarations

PREDICTIONS = ("auto", "argmax", "value", "binary_logit", "binary_probability", "argmax_probability")

_OWN_SETTINGS = ("num_proc", "min_num_proc", "max_num_proc", "verbose", "device", "spark")
RUN_OPTIONS = tuple(each.name for each in declarations(RunSettings) if each.name not in _OWN_SETTINGS)
"""The arguments of `spark_elastic.run` that are not settings of the estimators themselves."""

WRITE_OPTIONS = ("pad_to", "variable", "sparse", "allow_nan", "shard_bytes", "pre_shuffle")
_OF_CHECKPOINTS = (
    "checkpoint_interval",
    "checkpoint_seconds",
    "checkpoint_best_of",
    "checkpoint_best_mode",
    "keep_checkpoints",
)
READ_OPTIONS = ("order", "prefetch", "cache_dir", "cache_bytes")
"""What `materialize` and `BatchReader` take beside them."""


class FeatureColumns(ElasticParams):
    """Which columns go into the model."""

    feature_cols: Any = setting(
        "feature_cols",
        "columns that are the model's input. Scalar columns alone are stacked into one input [rows, columns]; if there "
        "are arrays or vectors among them, each column is an input of its own. A list of lists: an input for each "
        "inner list, its columns stacked or put end to end. See input_dtypes for their types.",
        to.grouped_names,
    )


class FeatureParams(FeatureColumns):
    """What goes into the model."""

    input_shapes: Any = setting(
        "input_shapes",
        "shape of one row of each input, such as [(1, 28, 28)]. Default: as in its column; [k] for k numbers, [] for a "
        "single column of integers.",
        to.shapes,
    )
    input_dtypes: Any = setting(
        "input_dtypes",
        "type of each input, as numpy calls it, such as ['int64', 'float32']; None in the list stands for the default: "
        "int64 for a column, and for an inner list of feature_cols, of integers alone, as embeddings need it; float32 "
        "for anything else, also for several columns of integers in a flat list. Integers that a type would round, in "
        "float32 from 2**24 on, are refused.",
        to.dtypes,
    )


class LabelParams(ElasticParams):
    """What the model's output is compared with."""

    label_cols: Any = setting(
        "label_cols", "columns that are compared with the model's outputs; [] if train_fn needs none.", to.names_or_none
    )
    label_shapes: Any = setting("label_shapes", "shape of one row of each label. Default: as in its column.", to.shapes)
    sample_weight_col: Any = setting("sample_weight_col", "column with the weight of each row in the loss.", to.text)
    validation: Any = setting(
        "validation",
        "rows to set aside for validation: a fraction, drawn at random with the seed, or the name of a boolean column "
        "that is true for them. Default: none.",
        to.fraction_or_column,
    )


class TrainingParams(ElasticParams):
    """How it is trained."""

    model: Any = setting("model", "what is trained; fit trains a copy of it.", to.anything)
    optimizer: Any = setting("optimizer", "the optimizer.", to.anything)
    loss: Any = setting("loss", "the loss, or a list with one for each label.", to.anything)
    loss_weights: Any = setting(
        "loss_weights", "factor of each loss in their sum; only with several. Default: 1 each.", to.numbers_list
    )
    metrics: Any = setting("metrics", "a dict of name and metric, reported for each epoch.", to.dictionary)
    batch_size: Any = setting(
        "batch_size",
        "rows of a global batch, which all workers together take in a step, however many there are. Default: 32, "
        "unless per_worker_batch_size is set.",
        to.whole(at_least=1),
    )
    per_worker_batch_size: Any = setting(
        "per_worker_batch_size",
        "rows that each worker takes in a step: the global batch then grows and shrinks with the world, and with it "
        "the course of the training. Instead of batch_size.",
        to.whole(at_least=1),
    )
    epochs: Any = setting("epochs", "passes over the training rows.", to.whole(at_least=1), default=1)
    shuffle: Any = setting("shuffle", "whether each epoch has an order of its own.", to.boolean, default=True)
    seed: Any = setting(
        "seed",
        "of the order, of the validation rows, and of dropout and the like, whose random numbers follow from the seed, "
        "the epoch, the batch and the rank.",
        to.whole(at_least=0),
        default=0,
    )
    transformation_fn: Any = setting(
        "transformation_fn",
        "function of a batch's columns, {'features_0': array, 'label_0': array, ...}, to those to train on, with as "
        "many rows. Applied to training and validation batches, not by the fitted model: see inference_fn.",
        to.function,
    )
    callbacks: Any = setting("callbacks", "list of spark_elastic.ml.callbacks.Callback.", to.anything)
    gradient_clip_norm: Any = setting(
        "gradient_clip_norm", "the global norm that gradients are scaled down to before a step.", to.real(above=0)
    )
    gradient_clip_value: Any = setting(
        "gradient_clip_value", "the absolute value that each gradient is cut off at before a step.", to.real(above=0)
    )
    gradient_compression: Any = setting(
        "gradient_compression",
        "'none', or 'fp16' or 'bf16': gradients travel in half precision.",
        to.one_of("none", "fp16", "bf16"),
        default="none",
    )
    sync_batch_norm: Any = setting(
        "sync_batch_norm",
        "whether batch normalisation takes mean and variance of all workers' rows of a batch, so that the number of "
        "workers does not matter, for two small reductions a layer and step. False: each worker those of its own rows.",
        to.boolean,
        default=True,
    )
    allow_nan_loss: Any = setting(
        "allow_nan_loss",
        "whether training goes on when the loss of a step is NaN or infinite; otherwise fit ends with a "
        "LossNotFiniteError.",
        to.boolean,
        default=False,
    )
    accumulation_steps: Any = setting(
        "accumulation_steps",
        "parts that each worker cuts its share of a batch into, one after the other, to save memory. The gradient is "
        "that of the whole batch.",
        to.whole(at_least=1),
        default=1,
    )
    device: Any = setting(
        "device",
        "device to train on: 'auto', 'cpu', 'cuda', 'cuda:0', ... Default, and 'auto': cuda where a worker has it.",
        to.text,
    )
    num_threads: Any = setting(
        "num_threads",
        "the framework's threads in each worker. Default: the workers of a host share its cores.",
        to.whole(1),
    )

    def _check_together(self) -> None:
        super()._check_together()
        if self._given("batch_size") and self._given("per_worker_batch_size"):
            raise InvalidSettingsError(
                f"batch_size={self._given('batch_size')} (of all workers together) and per_worker_batch_size="
                f"{self._given('per_worker_batch_size')} contradict each other; set one of them to None"
            )
        self._check_loss_weights()

    def _check_loss_weights(self) -> None:
        losses, weights = self._given("loss"), self._given("loss_weights")
        count = len(losses) if isinstance(losses, (list, tuple)) else None if losses is None else 1
        if weights is not None and count is not None and count != len(weights):
            raise InvalidSettingsError(f"{len(weights)} loss_weights for {count} losses; give one for each")


class ClusterParams(ElasticParams):
    """Where it is trained."""

    num_proc: Any = setting(
        "num_proc", "workers to start with. Default: the task slots of the cluster.", to.whole(at_least=1)
    )
    min_num_proc: Any = setting(
        "min_num_proc", "fewest workers to go on with. Default: num_proc.", to.whole(at_least=1)
    )
    max_num_proc: Any = setting("max_num_proc", "most workers to grow to. Default: num_proc.", to.whole(at_least=1))
    run_options: Any = setting(
        "run_options",
        f"dict of further arguments of spark_elastic.run: {', '.join(RUN_OPTIONS)}.",
        to.options(RUN_OPTIONS),
    )
    verbose: Any = setting(
        "verbose",
        "0: quiet, 1: a bar for each epoch (in a terminal or a notebook; few lines elsewhere) and a line for each "
        "epoch and change of the workers, 2: each step of them.",
        to.whole(at_least=0),
        default=1,
    )

    def _check_together(self) -> None:
        super()._check_together()
        low, first, high = (self._given(name) for name in ("min_num_proc", "num_proc", "max_num_proc"))
        pairs = (("min_num_proc", low, "num_proc", first), ("num_proc", first, "max_num_proc", high))
        for small, lower, large, upper in (*pairs, ("min_num_proc", low, "max_num_proc", high)):
            if lower is not None and upper is not None and lower > upper:
                raise InvalidSettingsError(f"{small}={lower} is larger than {large}={upper}")


class StorageParams(ElasticParams):
    """Where rows, checkpoints and results are kept."""

    store: Any = setting(
        "store",
        "path, URI or spark_elastic.Store that driver and executors share, for the rows and the results of a fit. "
        "Default: a temporary directory, which is shared only if all executors run on the driver's machine.",
        to.anything,
    )
    storage_options: Any = setting(
        "storage_options",
        "what the filesystem behind a URI needs, such as credentials. Not saved with an estimator: set "
        "it again after loading.",
        to.dictionary,
    )
    dataset_id: Any = setting(
        "dataset_id",
        "name that the written rows are found under again by a later fit, which then trusts you that they are still "
        "the same. Default: told from the query plan and its files.",
        to.text,
    )
    keep_dataset: Any = setting(
        "keep_dataset",
        "whether the written rows stay in the store, so that a later fit on the same rows need not write them.",
        to.boolean,
        default=False,
    )
    data_options: Any = setting(
        "data_options",
        f"dict of further arguments of spark_elastic.materialize ({', '.join(WRITE_OPTIONS)}; tensors are called "
        f"features_0, label_0, ...) and of spark_elastic.BatchReader ({', '.join(READ_OPTIONS)}).",
        to.options((*WRITE_OPTIONS, *READ_OPTIONS)),
    )
    checkpoint_dir: Any = setting(
        "checkpoint_dir", "shared path or URI for durable checkpoints. Default: none are written.", to.path
    )
    checkpoint_interval: Any = setting(
        "checkpoint_interval", "epochs between two checkpoints.", to.whole(at_least=1), default=1
    )
    checkpoint_seconds: Any = setting(
        "checkpoint_seconds", "also write one when this many seconds have passed since the last.", to.real(above=0)
    )
    checkpoint_best_of: Any = setting(
        "checkpoint_best_of",
        "column of the history, such as 'val_loss', by which the best epoch's checkpoint is kept as well. Default: "
        "only the last ones are.",
        to.text,
    )
    checkpoint_best_mode: Any = setting(
        "checkpoint_best_mode",
        "whether the least ('min') or the largest ('max') is best; 'auto': the least of what is called a loss or an "
        "error, the largest of anything else.",
        to.one_of("auto", "min", "max"),
        default="auto",
    )
    keep_checkpoints: Any = setting(
        "keep_checkpoints", "how many of the last checkpoints are kept.", to.whole(at_least=1), default=3
    )
    run_id: Any = setting(
        "run_id",
        "name of this training below checkpoint_dir. A fit with the run_id of one whose driver died goes on from its "
        "last checkpoint.",
        to.identifier,
    )
    resume: Any = setting(
        "resume",
        "whether checkpoints of run_id are gone on from; False starts anew and replaces them.",
        to.boolean,
        default=True,
    )

    def _check_together(self) -> None:
        super()._check_together()
        if self._given("run_id") is not None and self._given("checkpoint_dir") is None:
            raise InvalidSettingsError(
                f"run_id={self._given('run_id')!r} without checkpoint_dir: there is nothing to go on from; set both"
            )
        if self._given("checkpoint_dir") is None:
            for name in _OF_CHECKPOINTS:
                if self.isSet(name) and self._given(name) is not None:
                    raise InvalidSettingsError(f"{name}={self._given(name)!r} without checkpoint_dir: none are written")
        if self._given("checkpoint_best_of") is None and self.isSet("checkpoint_best_mode"):
            raise InvalidSettingsError("checkpoint_best_mode is set, but checkpoint_best_of is not: the best of what?")
        if not self._given("resume") and self._given("run_id") is None:
            raise InvalidSettingsError("resume=False without run_id: there is nothing that could be gone on from")


class OutputParams(ElasticParams):
    """What `transform` adds to the columns of its input."""

    output_cols: Any = setting(
        "output_cols",
        "names for the columns with the model's outputs as they are, one for each output: a double or integer where "
        "there is one value a row, an array otherwise. []: none. Default: 'output', or 'output_0', 'output_1', ... "
        "where there are several.",
        to.names_or_none,
    )
    output_type: Any = setting(
        "output_type",
        "'array', or 'vector': outputs of one axis become Spark ML vectors, as its evaluators need them.",
        to.one_of("array", "vector"),
        default="array",
    )
    prediction_col: Any = setting(
        "prediction_col",
        "name for the double column with the prediction that is made of the first output, as Spark's evaluators want "
        "it; '' for none.",
        lambda name, value: "" if isinstance(value, str) and not value else to.text(name, value),
        default="prediction",
    )
    prediction: Any = setting(
        "prediction",
        "how the prediction is made of the first output: 'argmax' of its values, 'argmax_probability' if they are "
        "probabilities already, the 'value' itself, 'binary_logit': 1 where it is above 0, 'binary_probability': 1 "
        "where it is above 0.5. 'auto': as the loss has it, or the value where there is one a row.",
        to.one_of(*PREDICTIONS),
        default="auto",
    )
    probability_col: Any = setting(
        "probability_col",
        "name for a vector column with the probability of each class (softmax or sigmoid of the first output, unless "
        "it has probabilities). Default: none.",
        to.text,
    )
    handle_invalid: Any = setting(
        "handle_invalid",
        "what transform does with rows that have a null in the model's input, NaN or infinity where fit refuses them "
        "(see allow_nan), or a NaN output of which no class can be told: 'error', 'skip' (such rows are left out of "
        "the result) or 'keep' (all columns that are added are null for them).",
        to.one_of("error", "skip", "keep"),
        default="error",
    )
    inference_fn: Any = setting(
        "inference_fn",
        "function of a batch's features, {'features_0': array, ...}, to those that the model is called with, by their "
        "order; what transformation_fn is in training. Default: none.",
        to.function,
    )
    transform_batch_size: Any = setting(
        "transform_batch_size", "rows that transform puts through the model at once.", to.whole(at_least=1), 4096
    )
    transform_threads: Any = setting(
        "transform_threads", "threads of each Python worker in transform.", to.whole(at_least=1), 1
    )
    transform_device: Any = setting(
        "transform_device", "device of the model in transform: 'cpu', 'cuda', 'cuda:0', ...", to.text, "cpu"
    )

    def _check_together(self) -> None:
        super()._check_together()
        added = [
            *(self._given("output_cols") or []),
            *filter(None, [self._given("prediction_col"), self._given("probability_col")]),
        ]
        for name in added:
            if added.count(name) > 1:
                raise InvalidSettingsError(
                    f"{name!r} would be {added.count(name)} of the output columns; give output_cols, prediction_col "
                    "and probability_col different names"
                )

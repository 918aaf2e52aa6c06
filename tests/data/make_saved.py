"""Write what users keep on disk, as this version writes it: the data of `test_saved_by_earlier_versions`.

    python -m tests.data.make_saved

Version 0.1.0 has written `saved_0_1`. It is read by every later version and is never written anew: what that version
wrote cannot be made again by another one. A version that writes something in a new way gets a folder of its own, by
this script as it is then.

::

    about.json       the versions of all packages that took part
    expected.json    what everything in the folder has to come to: predictions, settings, weights, rows
    models/          ElasticTorchModel and ElasticKerasModel, each by model.save(path)
    stages/          what Spark ML saves around them: Pipeline, PipelineModel, CrossValidatorModel, ...
    estimators/      ElasticTorchEstimator and ElasticKerasEstimator that have not been fitted
    runs/            checkpoint_dir of fits: one that ended in the middle of an epoch, and one that came to its end
    store/           a store with a set of all kinds of tensors, under its dataset_id, and a lease on it
    set/             the set that the fits of runs/ train on
    kept/            what users write themselves: torch.save, model.save of Keras, pickle

All of it is written in a folder of temporary files and moved here, so that no file knows of the place where it lies.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import pickle
import platform
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import keras
import numpy as np
import torch
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.feature import StringIndexer, VectorAssembler
from pyspark.ml.linalg import Vectors
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder, TrainValidationSplit
from torch import nn

import spark_elastic
import spark_elastic.keras as khvd
import spark_elastic.torch as hvd
from spark_elastic import ElasticKerasEstimator, ElasticTorchEstimator, FixedHosts, LocalLauncher, Store, materialize
from spark_elastic.data.dataset import pack
from spark_elastic.errors import SparkElasticError
from spark_elastic.ml.callbacks import BestCheckpoint, EarlyStopping, HistoryLogger, LambdaCallback
from spark_elastic.reporting.history import History
from tests.data import own_keras, own_torch, saved_cases
from tests.data.saved_cases import ENDS_AT, glorot, plain_settings
from tests.integration.clusters import local

HERE = Path(__file__).parent
OUT = Path("/tmp/saved")
PACKAGES = ("torch", "numpy", "pyspark", "cloudpickle", "pandas", "pyarrow", "keras", "tensorflow-cpu")
ROWS = 60

expected: dict[str, Any] = {}


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    with local(2, spark_sql_shuffle_partitions="2") as cluster:
        rows = table(cluster.spark)
        models(rows)
        around_estimators(rows)
        estimators(cluster.spark)
        tensors_of_all_kinds(cluster.spark)
    make_set()
    runs_of_torch()
    runs_of_keras()
    kept_by_users()
    write("expected.json", expected)
    versions = {name: version for name in PACKAGES if (version := installed(name))}
    write("about.json", {"spark_elastic": spark_elastic.__version__, "python": platform.python_version(), **versions})
    for notes in list(OUT.rglob("checked")):  # which mean something on the host that has written them
        shutil.rmtree(notes)
    check_that_no_file_knows_of(str(HERE.parents[1]))
    target = HERE / f"saved_{'_'.join(spark_elastic.__version__.split('.')[:2])}"
    shutil.copytree(OUT, target)
    print(f"{target}: {sum(file.stat().st_size for file in target.rglob('*') if file.is_file()) >> 10} KiB")


def write(name: str, document: dict[str, Any]) -> None:
    """As JSON, with a line for each entry."""
    lines = [f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in document.items()]
    (OUT / name).write_text("{\n" + ",\n".join(lines) + "\n}\n")


def installed(name: str) -> str:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return ""


# --- models -----------------------------------------------------------------------------------------


def table(spark: Any) -> Any:
    """id, a, b, v, word, kind, size, aside. The first twelve are what models are asked for."""
    made = []
    for index in range(ROWS):
        a, b, word = index % 7 / 7, index % 5 / 5, index % 5
        vector = Vectors.dense([index % 3, index % 11 / 11])
        kind = f"kind {(index % 3 + word) % 3}"
        made.append((index, a, b, vector, word, kind, a + 2 * b, index % 4 == 0))
    expected["rows"] = [[*row[:3], row[3].toArray().tolist(), *row[4:]] for row in made[:12]]
    return spark.createDataFrame(made, ["id", "a", "b", "v", "word", "kind", "size", "aside"]).cache()


def prepared() -> list[Any]:
    """Stages that make x of a, b and v, and label of kind."""
    return [
        VectorAssembler(inputCols=["a", "b", "v"], outputCol="x"),
        StringIndexer(inputCol="kind", outputCol="label"),
    ]


def kept(name: str, fitted: Any, rows: Any) -> None:
    """Save what was fitted, with what it says of the first rows."""
    fitted.save(str(OUT / name))
    made = fitted.transform(rows.where("id < 12"))
    added = [column for column in made.columns if column not in (*rows.columns, "x", "label")]
    expected[name] = saved_cases.added_columns(made, added)
    if hasattr(fitted, "history"):
        expected[f"{name} history"] = fitted.history.to_json()
        expected[f"{name} events"] = fitted.events
        expected[f"{name} uid"] = fitted.uid
        expected[f"{name} settings"] = plain_settings(fitted)


def torch_net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


def torch_estimator(**changes: Any) -> ElasticTorchEstimator:
    net = torch_net()
    made = {
        "model": net,
        "optimizer": torch.optim.Adam(net.parameters(), lr=0.02),
        "loss": nn.CrossEntropyLoss(),
        "feature_cols": ["x"],
        "label_cols": ["label"],
        "batch_size": 20,
        "epochs": 2,
        "num_proc": 2,
        "verbose": 0,
        **changes,
    }
    return ElasticTorchEstimator(**made)


def two_inputs(*layers: Any) -> Any:
    """A Keras model of x [2] and word: probabilities of three kinds, and a size."""
    made = keras.layers
    x, word = keras.Input((2,), name="x"), keras.Input((1,), dtype="int32", name="word")
    embedded = made.Flatten()(made.Embedding(5, 2, embeddings_initializer=glorot(1))(word))
    hidden = made.Dense(6, kernel_initializer=glorot(2))(made.Concatenate()([x, embedded]))
    for layer in layers or (made.BatchNormalization(), made.Activation("tanh")):
        hidden = layer(hidden)
    kind = made.Dense(3, activation="softmax", name="of_kind", kernel_initializer=glorot(3))(hidden)
    size = made.Dense(1, name="of_size", kernel_initializer=glorot(4))(hidden)
    return keras.Model([x, word], [kind, size])


def small(units: int, *layers: Any) -> Any:
    """A Keras model of x [4]: probabilities of several kinds, or a number."""
    last = keras.layers.Dense(units, activation="softmax" if units > 1 else None, kernel_initializer=glorot(5))
    return keras.Sequential([keras.Input((4,)), *layers, last])


def keras_estimator(**changes: Any) -> ElasticKerasEstimator:
    made = {
        "model": small(3),
        "optimizer": keras.optimizers.Adam(0.02),
        "loss": "sparse_categorical_crossentropy",
        "feature_cols": ["x"],
        "label_cols": ["label"],
        "batch_size": 20,
        "epochs": 2,
        "num_proc": 2,
        "verbose": 0,
        **changes,
    }
    return ElasticKerasEstimator(**made)


def models(rows: Any) -> None:
    """The models alone, and a pipeline with one of each framework."""
    stages = Pipeline(stages=prepared()).fit(rows).stages
    ready = PipelineModel(stages).transform(rows).cache()
    plain = torch_estimator(
        validation="aside",
        output_cols=["logits"],
        output_type="vector",
        prediction_col="by_torch",
        probability_col="probability",
        transform_batch_size=5,
    ).fit(ready)
    kept("models/torch", plain, ready)
    own = torch_estimator(
        model=own_torch.TwoInputs(),
        optimizer=own_torch.adam,
        loss=[nn.CrossEntropyLoss(), nn.MSELoss()],
        loss_weights=[1.0, 0.5],
        metrics={"error": (1, own_torch.error)},
        feature_cols=[["a", "b"], ["word"]],
        label_cols=["label", "size"],
        inference_fn=own_torch.doubled,
        handle_invalid="skip",
    ).fit(ready)
    kept("models/torch_own", own, ready)
    of_keras = keras_estimator(
        model=two_inputs(),
        loss={"of_kind": "sparse_categorical_crossentropy", "of_size": "mse"},
        loss_weights={"of_kind": 1.0, "of_size": 0.5},
        metrics={"of_kind": ["accuracy"]},
        feature_cols=[["a", "b"], ["word"]],
        label_cols=["label", "size"],
        validation=0.2,
        output_cols=["kinds", "sizes"],
        prediction_col="by_keras",
        probability_col="probability",
    )
    kept("models/keras", of_keras.fit(ready), ready)
    own_of_keras = keras_estimator(
        model=small(1, own_keras.Scaled(0.5), khvd.SyncBatchNormalization()),
        loss=own_keras.distance,
        label_cols=["size"],
        custom_objects={"Scaled": own_keras.Scaled},
        inference_fn=own_keras.tenfold,
    )
    kept("models/keras_own", own_of_keras.fit(ready), ready)
    kept("models/keras_synchronised", keras_estimator(model=small(3, khvd.SyncBatchNormalization())).fit(ready), ready)
    beside = keras_estimator(output_cols=["kinds"], prediction_col="by_keras").fit(ready)
    kept("stages/pipeline_model", PipelineModel([*stages, plain, beside]), rows)


def around_estimators(rows: Any) -> None:
    """What Spark ML saves that has fitted an estimator."""
    ready = Pipeline(stages=prepared()).fit(rows).transform(rows).cache()
    estimator = torch_estimator(output_cols=[])
    tools = {"evaluator": MulticlassClassificationEvaluator(metricName="accuracy"), "seed": 1}
    grid = ParamGridBuilder().addGrid(estimator.epochs, [1, 2]).build()
    crossed = CrossValidator(estimator=estimator, estimatorParamMaps=grid, numFolds=2, **tools).fit(ready)
    kept("stages/cross_validator_model", crossed, ready)
    expected["stages/cross_validator_model metrics"] = crossed.avgMetrics
    estimator = keras_estimator(output_cols=["kinds"])
    grid = ParamGridBuilder().addGrid(estimator.epochs, [1]).build()
    split = TrainValidationSplit(estimator=estimator, estimatorParamMaps=grid, trainRatio=0.8, **tools).fit(ready)
    kept("stages/train_validation_split_model", split, ready)
    Pipeline(stages=[prepared()[0], torch_estimator(callbacks=[EarlyStopping("loss", patience=7)])]).save(
        str(OUT / "stages/pipeline")
    )


# --- estimators -------------------------------------------------------------------------------------

SETTINGS = {
    "feature_cols": [["a", "b"], ["word"]],
    "input_shapes": [[2], []],
    "input_dtypes": ["float32", "int64"],
    "label_cols": ["label", "size"],
    "label_shapes": [[], []],
    "sample_weight_col": "w",
    "validation": 0.25,
    "batch_size": 48,
    "epochs": 7,
    "shuffle": False,
    "seed": 11,
    "gradient_clip_norm": 1.5,
    "gradient_clip_value": 0.5,
    "gradient_compression": "bf16",
    "sync_batch_norm": False,
    "allow_nan_loss": True,
    "accumulation_steps": 2,
    "device": "cpu",
    "num_threads": 3,
    "num_proc": 2,
    "min_num_proc": 1,
    "max_num_proc": 4,
    "run_options": {"start_timeout": 30.0, "reset_limit": 9, "env": {"NAME": "value"}},
    "verbose": 0,
    "store": "/data/rows",
    "storage_options": {"key": "a secret"},
    "dataset_id": "rows-of-may",
    "keep_dataset": True,
    "data_options": {"pad_to": {"features_0": 2}, "prefetch": 3},
    "checkpoint_dir": "/data/runs",
    "checkpoint_interval": 2,
    "checkpoint_seconds": 30.0,
    "checkpoint_best_of": "val_loss",
    "checkpoint_best_mode": "min",
    "keep_checkpoints": 5,
    "run_id": "may",
    "resume": False,
    "output_cols": ["kinds", "sizes"],
    "output_type": "vector",
    "prediction_col": "class",
    "prediction": "argmax",
    "probability_col": "probability",
    "handle_invalid": "keep",
    "transform_batch_size": 77,
    "transform_threads": 2,
    "transform_device": "cpu",
}
"""All that JSON can hold and that goes together."""

NOTEBOOK = """
import torch
import spark_elastic.torch as hvd
from spark_elastic.ml.callbacks import EarlyStopping

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = hvd.SyncBatchNorm(4)
        self.last = torch.nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.norm(x))

class Impatient(EarlyStopping):
    def __init__(self):
        super().__init__("loss", patience=1)

def train_fn(model, batch):
    factor = 2.0 if isinstance(model.norm, hvd.SyncBatchNorm) else 1.0
    return torch.nn.functional.cross_entropy(model(*batch.inputs), batch.labels[0]) * factor
"""
"""What is defined in a notebook is pickled by value, and with it the names that it uses."""


def estimators(spark: Any) -> None:
    assert spark is not None, "saving needs a session"
    makers = (
        *(estimator_of_torch, estimator_of_torch_with_code, estimator_of_a_notebook, estimator_of_keras),
        *(estimator_of_a_compiled_model, estimator_of_keras_with_code, estimator_with_a_warmup),
    )
    for name, make in zip(saved_cases.INPUTS, makers, strict=True):
        estimator = make()
        estimator.save(str(OUT / name))
        expected[f"{name} settings"] = plain_settings(estimator)
        expected[f"{name} uid"] = estimator.uid
        expected[f"{name} says"] = saved_cases.says(name, estimator.getModel())
        expected[f"{name} set"] = sorted(param.name for param in estimator.params if estimator.isSet(param))


def estimator_of_torch() -> Any:
    """Nothing but torch's own: it needs no trust."""
    net = torch_net()
    groups: list[dict[str, Any]] = [{"params": net[0].parameters()}, {"params": net[3].parameters(), "lr": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    return ElasticTorchEstimator(
        **SETTINGS,
        model=net,
        optimizer=optimizer,
        loss=[nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 0.5]), label_smoothing=0.1), nn.HuberLoss(delta=2.0)],
        loss_weights=[1.0, 0.25],
        lr_scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5),
        scheduler_interval="step",
        scheduler_monitor="loss",
        metrics={"error": nn.functional.l1_loss},
        callbacks=[
            EarlyStopping("val_loss", patience=4, min_delta=0.01),
            BestCheckpoint("val_error", mode="min", restore=False),
            HistoryLogger("/data/history.csv"),
        ],
    )


def estimator_of_torch_with_code() -> Any:
    return ElasticTorchEstimator(
        model=own_torch.TwoInputs(),
        optimizer=own_torch.adam,
        train_fn=own_torch.squared,
        lr_scheduler=own_torch.halved,
        metrics={"error": (1, own_torch.error), "median": (0, own_torch.Median())},
        callbacks=[
            own_torch.Impatient(),
            LambdaCallback(on_epoch_end=own_torch.say),
            own_torch.Steps("/data/steps", 9),
            BestCheckpoint("loss"),
        ],
        transformation_fn=own_torch.doubled,
        inference_fn=functools.partial(own_torch.doubled),
        run_options={"launcher": LocalLauncher(["127.0.0.1", "127.0.0.2"], cores=2), "discovery": FixedHosts("h1:2")},
        store=Store.create("/data/rows"),
        epochs=3,
    )


def estimator_of_a_notebook() -> Any:
    notebook: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(NOTEBOOK, "notebook", "exec"), notebook)
    torch.manual_seed(5)
    return ElasticTorchEstimator(
        model=notebook["Net"](),
        optimizer=torch.optim.SGD,
        train_fn=notebook["train_fn"],
        callbacks=[notebook["Impatient"]()],
        feature_cols=["x"],
    )


def estimator_of_keras() -> Any:
    """Nothing but Keras's own: it needs no trust."""
    return ElasticKerasEstimator(
        **SETTINGS,
        model=two_inputs(),
        optimizer=keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.5, 3, 0.9), momentum=0.8),
        loss={
            "of_kind": keras.losses.SparseCategoricalCrossentropy(),
            "of_size": keras.losses.BinaryCrossentropy(label_smoothing=0.1),
        },
        loss_weights={"of_kind": 1.0, "of_size": 0.25},
        metrics={"of_kind": ["accuracy"], "of_size": [keras.metrics.MeanAbsoluteError(name="error")]},
        weighted_metrics={"of_size": ["mse"]},
        callbacks=[
            EarlyStopping("val_loss", patience=4, min_delta=0.01),
            BestCheckpoint("val_of_size_error", mode="min", restore=False),
            HistoryLogger("/data/history.csv"),
        ],
    )


def estimator_of_a_compiled_model() -> Any:
    """What the model was compiled with, and what its optimizer has learnt, is saved with it."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, kernel_initializer=glorot(6))])
    model.compile(keras.optimizers.Adam(0.1), keras.losses.CategoricalCrossentropy(from_logits=True), metrics=["mae"])
    model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
    expected["estimators/keras_compiled weights"] = [each.tolist() for each in model.get_weights()]
    expected["estimators/keras_compiled slots"] = [np.asarray(each).tolist() for each in model.optimizer.variables]
    return ElasticKerasEstimator(model=model, feature_cols=["a"])


def estimator_of_keras_with_code() -> Any:
    model = small(1, own_keras.Scaled(0.5), khvd.SyncBatchNormalization())
    model.compile("adam", own_keras.Offset(0.5))
    return ElasticKerasEstimator(
        model=model,
        optimizer=keras.optimizers.Adam(0.03),
        loss=[own_keras.Offset(0.25)],
        metrics=[own_keras.distance, keras.metrics.MeanAbsoluteError(name="error")],
        callbacks=[
            EarlyStopping("loss", patience=2),
            keras.callbacks.ReduceLROnPlateau(monitor="loss", factor=0.25, patience=1),
            khvd.BestModelCheckpoint(monitor="loss", filepath="/data/best.keras"),
            LambdaCallback(on_epoch_end=own_torch.say),
        ],
        custom_objects={"Scaled": own_keras.Scaled},
        inference_fn=own_keras.tenfold,
    )


def estimator_with_a_warmup() -> Any:
    """A callback of the package that has a function within a function, which is pickled by value, with its file."""
    khvd.callbacks.__file__ = "callbacks.py"
    callback = khvd.callbacks.LearningRateWarmupCallback(initial_lr=0.1, warmup_epochs=2)
    callback.multiplier.__code__ = callback.multiplier.__code__.replace(co_filename="callbacks.py")
    return ElasticKerasEstimator(model=small(1, own_keras.Scaled(2.0)), callbacks=[callback])


# --- runs -------------------------------------------------------------------------------------------


def make_set() -> None:
    """96 rows to train on and 32 for validation: features_0 [6] float32, label_0 one of three classes."""
    generator = np.random.default_rng(7)
    truth = generator.normal(size=(6, 3))

    def rows(count: int) -> dict[str, Any]:
        features = generator.normal(size=(count, 6)).astype(np.float32)
        return {"features_0": features, "label_0": (features @ truth).argmax(1)}

    pack(rows(96), OUT / "set", validation=rows(32), shards=2)


def interrupted(name: str, kind: Any, settings: Callable[[], Any], callbacks: Callable[..., Any]) -> Any:
    """A run that raises in its third epoch. Returns: the model that it comes to if it does not."""
    log, runs = OUT / "steps", OUT / "runs"
    whole = kind(**settings(), callbacks=callbacks(log)).from_dataset_path(OUT / "set")
    lasting = {**saved_cases.LASTING, "checkpoint_dir": str(runs), "run_id": name}
    said = ""
    try:
        kind(**settings(), **lasting, callbacks=callbacks(log, ENDS_AT, 0.1)).from_dataset_path(OUT / "set")
    except SparkElasticError as error:
        said = str(error)
    assert f"the end at step {ENDS_AT}" in said, said
    log.unlink()
    names = sorted(path.name for path in (runs / name / "checkpoints").iterdir())
    newest = json.loads((runs / name / "checkpoints" / names[-1] / "checkpoint.json").read_bytes())
    assert newest["position"] > 0, "the newest checkpoint is of the middle of an epoch"
    assert newest["epoch"] == 2
    expected[f"runs/{name}"] = {
        "step": newest["step"],
        "count": newest["document"]["callbacks"][-2]["state"]["count"],
        "done": newest["document"]["at"]["history"],
        "history": whole.history.to_json(),
    }
    forget_the_machine(runs / name)
    return whole


def runs_of_torch() -> None:
    whole = interrupted("torch", ElasticTorchEstimator, saved_cases.of_torch, saved_cases.callbacks_of_torch)
    expected["runs/torch"]["weights"] = [value.tolist() for value in whole.module.state_dict().values()]
    done = {"epochs": 2, "checkpoint_dir": str(OUT / "runs"), "run_id": "torch_done", "keep_checkpoints": 1}
    log = OUT / "steps"
    ElasticTorchEstimator(
        **{**saved_cases.of_torch(), **done}, callbacks=saved_cases.callbacks_of_torch(log)
    ).from_dataset_path(OUT / "set")
    log.unlink()
    forget_the_machine(OUT / "runs" / "torch_done")


def runs_of_keras() -> None:
    whole = interrupted("keras", ElasticKerasEstimator, saved_cases.of_keras, saved_cases.callbacks_of_keras)
    expected["runs/keras"]["weights"] = [each.tolist() for each in whole.keras_model.get_weights()]


def forget_the_machine(run: Path) -> None:
    """Who had the run was a process of some other machine, as far as anybody can tell."""
    for owner in (run / "owners").iterdir():
        about = json.loads(owner.read_bytes())
        assert about["released"]
        about["process"] |= {"host": "trainer", "machine": "trainer", "program": "train.py", "pid": 4711}
        owner.write_text(json.dumps(about, indent=1))


# --- sets -------------------------------------------------------------------------------------------


def tensors_of_all_kinds(spark: Any) -> None:
    store = OUT / "store"
    made = [
        (
            index,
            [float(index), index / 2],
            Vectors.sparse(50, [index, index + 3], [1.0, index / 4]),
            f"text {index} ä",
            bytes(range(index)),
            list(range(index % 4)),
            bytes([index, 255 - index]),
            index % 2 == 0,
            index % 5 == 0,
        )
        for index in range(24)
    ]
    names = ["id", "pair", "vector", "text", "bytes", "some", "two", "even", "aside"]
    df = spark.createDataFrame(made, names).repartition(1).sortWithinPartitions("id")
    dataset = materialize(df, **REQUEST, store=store, dataset_id="kinds", verbose=0)
    expected["store kinds"] = {split: saved_cases.tensors(dataset, split) for split in ("train", "validation")}
    expected["store orders"] = {order: saved_cases.in_order(dataset, order) for order in ("global", "lanes")}
    expected["store request"] = REQUEST
    with dataset.lease():
        (lease,) = (store / "spark_elastic-sets" / "kinds" / "leases").iterdir()
        document = json.loads(lease.read_bytes())
        held = lease.name
    document |= {"until": 4102444800.0, "host": "trainer", "pid": 4711}  # in the year 2100
    lease.with_name(held).write_text(json.dumps(document))


REQUEST: dict[str, Any] = {
    "tensors": {
        "id": "id",
        "pair": "pair",
        "joined": ["id", "even"],
        "vector": "vector",
        "text": "text",
        "bytes": "bytes",
        "some": "some",
        "filled": "some",
        "two": "two",
        "half": "pair",
    },
    "dtypes": {"half": "float16", "joined": "int32", "vector": "float32"},
    "shapes": {"pair": [2, 1]},
    "pad_to": {"filled": 3},
    "variable": ["bytes", "some"],
    "sparse": {"vector": True},
    "validation": "aside",
    "seed": 3,
}


# --- what users write -------------------------------------------------------------------------------


def kept_by_users() -> None:
    """Models and optimizers of programs with a loop of their own."""
    kept = OUT / "kept"
    kept.mkdir()
    hvd.init()
    torch.manual_seed(2)
    net = hvd.SyncBatchNorm.convert_sync_batchnorm(torch_net())
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(net.parameters(), lr=0.05), net.named_parameters())
    sampler = hvd.elastic.ElasticSampler(range(20), shuffle=True, seed=4)
    for _ in range(3):
        saved_cases.step(net, optimizer)
    sampler.set_epoch(1)
    sampler.record_batch(0, 6)
    states = {"model": net, "optimizer": optimizer.state_dict(), "sampler": sampler.state_dict()}
    torch.save(states, kept / "torch.pt")
    expected["kept/torch next losses"] = [saved_cases.step(net, optimizer) for _ in range(2)]
    sampler.reset()  # deals out what is left, as loading its state does
    expected["kept/torch left"] = sampler.remaining_indices
    optimizer.detach()

    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(6, kernel_initializer=glorot(1)),
            khvd.SyncBatchNormalization(),
            keras.layers.Dense(1, kernel_initializer=glorot(2)),
        ]
    )
    model.compile(khvd.DistributedOptimizer(keras.optimizers.Adam(0.05)), "mse")
    x, y = saved_cases.few_rows(), saved_cases.few_rows().sum(axis=1)
    for _ in range(3):
        model.train_on_batch(x, y)
    model.save(kept / "keras.keras")
    expected["kept/keras next losses"] = [float(model.train_on_batch(x, y)) for _ in range(2)]
    hvd.shutdown()

    rows = [{"epoch": 0, "loss": 0.5}, {"epoch": 1, "loss": 0.25}]
    (kept / "history.pkl").write_bytes(pickle.dumps(History(rows), 4))
    expected["kept/history"] = rows


# --- what must not be in it -------------------------------------------------------------------------


def check_that_no_file_knows_of(place: str) -> None:
    for file in OUT.rglob("*"):
        if file.is_file():
            for name, content in contents(file):
                assert place.encode() not in content, f"{name} names {place}"


def contents(file: Path) -> Iterator[tuple[str, bytes]]:
    """Of a file, and of those in it if it is an archive."""
    yield str(file), file.read_bytes()
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            for name in archive.namelist():
                yield f"{file}:{name}", archive.read(name)


if __name__ == "__main__":
    main()

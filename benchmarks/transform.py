"""`transform` on a million rows, and the same model put to one row at a time, as Horovod does it.

20 float columns, an MLP 20-256-256-2, two task slots. The peer is written in the manner of Horovod's TorchModel: over
`df.rdd.mapPartitions`, each row a tensor of its own through the model, a new row out of the old one and the result; it
is given fewer rows. Where ours is a Keras model the peer is torch's nevertheless. "The model alone" is the rate of one
core that calls the same model with arrays in memory, in batches of the same size: twice that is the most that two task
slots can reach. A stream of Parquet files, one a micro-batch, shows what a micro-batch takes from end to end.

    python benchmarks/transform.py --repeat 5 [--framework keras]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._harness import Series, horovod, parser, report
from benchmarks.fit import COLUMNS, make_keras_net, make_net, table

HOROVOD_ROWS_PER_S = 4.1e3
"""Measured with Horovod's own TorchModel, on a machine of this kind."""


STREAMED = 10
"""Micro-batches of the stream."""


HIDDEN = {"20-64-2": (64,), "20-512-512-2": (512, 512)}
"""Widths of the hidden layers of the nets that are put to `predict_batch_udf`."""


def make_model(framework: str = "torch", module: Any = None, probabilities: bool = True) -> Any:
    from spark_elastic import ElasticKerasModel, ElasticTorchModel
    from spark_elastic.data.manifest import TensorField
    from spark_elastic.ml.added_columns import OutputShape
    from spark_elastic.ml.fitted import Fitted

    inputs = (TensorField("features_0", tuple(COLUMNS), "<f4", (20,)),)
    fitted = Fitted(inputs, (OutputShape("<f4", (2,)),), "argmax")
    model = ElasticTorchModel() if framework == "torch" else ElasticKerasModel()
    model._attach(module or (make_net() if framework == "torch" else make_keras_net()), fitted)
    return model if probabilities else model._set(probability_col=None, raw_prediction_col=None)


def rows_per_second(df: Any, count: int) -> float:
    start = time.monotonic()
    df.write.format("noop").mode("overwrite").save()
    return count / (time.monotonic() - start)


def model_alone(model: Any, seconds: float) -> float:
    """Return the rows a second of the model on one core, in the form in which executors have it."""
    import numpy as np

    predict = model._predictor()()
    size = model.getOrDefault("transform_batch_size") or predict.rows
    inputs = {"features_0": np.random.default_rng(0).random((size, 20), dtype=np.float32)}
    calls, start = 0, time.monotonic()
    while time.monotonic() < start + seconds:
        predict(inputs)
        calls += 1
    return calls * size / (time.monotonic() - start)


def micro_batches(df: Any, model: Any, batches: int) -> list[float]:
    """Return the ms of each micro-batch of a stream that has the rows of `df` in as many files, but for the first."""
    spark = df.sparkSession
    with tempfile.TemporaryDirectory(prefix="spark_elastic-stream-") as folder:
        df.repartition(batches).write.parquet(f"{folder}/rows")
        stream = spark.readStream.schema(df.schema).option("maxFilesPerTrigger", 1).parquet(f"{folder}/rows")
        writer = model.transform(stream).writeStream.format("noop").trigger(availableNow=True)
        query = writer.option("checkpointLocation", f"{folder}/checkpoint").start()
        query.awaitTermination()
        taken = [each["durationMs"]["triggerExecution"] for each in query.recentProgress if each["numInputRows"]]
    if len(taken) != batches:
        raise RuntimeError(f"the stream had {len(taken)} micro-batches of {batches} files")
    return [float(each) for each in taken[1:]]


def by_the_row(df: Any, module: Any) -> Any:
    shared = df.sparkSession.sparkContext.broadcast(module)

    def predict(rows: Iterable[Any]) -> Iterator[Any]:
        import torch
        from pyspark.sql import Row

        torch.set_num_threads(1)
        net = shared.value.eval()
        with torch.no_grad():
            for row in rows:
                values = row.asDict()
                output = net(torch.tensor([[values[name] for name in COLUMNS]], dtype=torch.float32))[0]
                values["output"] = output.tolist()
                values["prediction"] = float(output.argmax())
                yield Row(**values)

    from pyspark.sql.types import ArrayType, DoubleType, FloatType, StructField, StructType

    schema = StructType(
        [
            *df.schema.fields,
            StructField("output", ArrayType(FloatType())),
            StructField("prediction", DoubleType()),
        ]
    )
    return df.sparkSession.createDataFrame(df.rdd.mapPartitions(predict), schema)


def by_hand(df: Any, module: Any) -> Any:
    """Add the columns of `transform` but those of class probabilities, by Spark's `predict_batch_udf`."""
    from pyspark.ml.functions import predict_batch_udf
    from pyspark.sql import functions as F
    from pyspark.sql.types import ArrayType, DoubleType, FloatType, StructField, StructType

    def load() -> Any:
        import torch

        torch.set_num_threads(1)
        net = module.eval()

        def predict(inputs: Any) -> Any:
            with torch.no_grad():
                output = net(torch.from_numpy(inputs)).numpy()
            return {"output": output, "prediction": output.argmax(1).astype("float64")}

        return predict

    added = StructType([StructField("output", ArrayType(FloatType())), StructField("prediction", DoubleType())])
    predict = predict_batch_udf(load, return_type=added, batch_size=4096, input_tensor_shapes=[[len(COLUMNS)]])
    return df.withColumn("added", predict(F.array(*COLUMNS))).select("*", "added.*").drop("added")


def beside_udf(df: Any, rows: int, repeat: int) -> dict[str, list[float]]:
    """Return rows a second by net and contender, measured in turns."""
    found: dict[str, list[float]] = {}
    for name, hidden in HIDDEN.items():
        module = make_net(*hidden)
        contenders = {
            f"transform, {name}": make_model(module=module, probabilities=False).transform(df),
            f"with probabilities, {name}": make_model(module=module).transform(df),
            f"predict_batch_udf, {name}": by_hand(df, module),
        }
        for turn in range(repeat + 1):
            for contender, result in contenders.items():
                speed = rows_per_second(result, rows)
                if turn:  # the first turn loads the model
                    found.setdefault(contender, []).append(speed)
        ours, with_classes, peer = (statistics.median(found[each]) for each in contenders)
        print(f"{name}: transform / predict_batch_udf {ours / peer:.2f}; with probabilities {with_classes / ours:.2f}")
    return found


def main() -> None:
    arguments = parser(__doc__, repeat=5)
    arguments.add_argument("--rows", type=int, default=1_000_000)
    arguments.add_argument("--framework", choices=["torch", "keras"], default="torch", help="of the model")
    arguments.add_argument("--horovod-python", metavar="PYTHON", help="an interpreter that has Horovod (README.md)")
    arguments.add_argument("--peer-rows", type=int, default=20_000)
    args = arguments.parse_args()
    repeat = 2 if args.quick else args.repeat

    from tests.integration.clusters import local

    with local(2) as cluster:
        df, few = table(cluster.spark, args.rows, 1), table(cluster.spark, args.peer_rows, 2)
        model = make_model(args.framework)
        module = make_net()
        rows_per_second(model.transform(few), args.peer_rows)  # the workers have imported torch, and the model
        rows_per_second(by_the_row(few.limit(100), module), 100)
        ours: list[float] = []
        theirs: list[float] = []
        for _ in range(repeat):
            ours.append(rows_per_second(model.transform(df), args.rows))
            theirs.append(rows_per_second(by_the_row(few, module), args.peer_rows))
        stream, in_batch = table(cluster.spark, STREAMED * args.rows // 20, 3), args.rows // 20
        in_stream = micro_batches(stream, model, STREAMED)
        beside = beside_udf(df, args.rows, repeat) if args.framework == "torch" else {}
    alone = [model_alone(model, 1.0) for _ in range(repeat)]
    ratio = statistics.median(ours) / statistics.median(theirs)
    print(
        f"transform / row at a time: {ratio:.0f}; / Horovod's {HOROVOD_ROWS_PER_S:.0f} rows/s: "
        f"{statistics.median(ours) / HOROVOD_ROWS_PER_S:.0f}"
    )
    of_horovod: list[float] = []
    if args.horovod_python:
        walls = horovod(args.horovod_python, "transform", "--rows", args.peer_rows, "--repeat", repeat)
        of_horovod = [args.peer_rows / wall for wall in walls]
        print(f"transform / Horovod's: {statistics.median(ours) / statistics.median(of_horovod):.0f}")
    report(
        "transform" if args.framework == "torch" else "transform_keras",
        args,
        Series("transform", ours, "rows/s"),
        Series("one row at a time", theirs, "rows/s"),
        Series("the model alone, one core", alone, "rows/s"),
        Series(f"micro-batch of {in_batch:,} rows", in_stream, "ms"),
        *([Series("Horovod's TorchModel", of_horovod, "rows/s")] if of_horovod else []),
        *(Series(name, speeds, "rows/s") for name, speeds in beside.items()),
        raw={"transform": ours, "row at a time": theirs, "Horovod": of_horovod, "alone": alone, "stream": in_stream},
    )


if __name__ == "__main__":
    main()

"""ElasticModel: the Spark ML Transformer that a fit returns, whatever framework trained it."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pyspark.ml import Model

from spark_elastic.data import travel
from spark_elastic.data.columns import check_travels, find_column, is_case_sensitive
from spark_elastic.data.manifest import TensorField
from spark_elastic.errors import DataError, InvalidSettingsError
from spark_elastic.ml import tables
from spark_elastic.ml.added_columns import BY_CLASS, AddedColumn, OutputShape, spark_type, suits
from spark_elastic.ml.fitted import Fitted
from spark_elastic.ml.persistence import Savable
from spark_elastic.ml.serving import Predictor, Serving, tensors_for
from spark_elastic.ml.shared_params import NOTHING_ADDED, FeatureColumns, OutputParams
from spark_elastic.reporting.history import History, draw_training
from spark_elastic.spark.cluster import Cluster
from spark_elastic.spark.session import cluster_of
from spark_elastic.wire.pickling import dumps


def _with_udf(dataset: Any, serving: Serving, functions: Any) -> Any:
    """Return a DataFrame with the columns that an Arrow UDF adds to those of `dataset`, which Spark keeps to itself.

    The UDF returns a list for each row, which `inline` unpacks: Spark moves filters on what is added no further down
    than to there, where they would call the model once more.
    """
    import pyarrow as pa
    from pyspark.sql.types import ArrayType, StructField, StructType

    def predictions(batches: Iterator[Any]) -> Iterator[Any]:
        return serving.as_lists(batches)

    # these say to Spark what kind of UDF it is
    given: Any = pa.Array if len(serving.groups) == 1 else tuple[pa.Array, ...]
    predictions.__annotations__ = {"batches": Iterator[given], "return": Iterator[pa.Array]}
    fields = [StructField(str(n), spark_type(each), serving.keeps) for n, each in enumerate(serving.added)]
    made = functions.arrow_udf(predictions, ArrayType(StructType(fields), containsNull=False))
    added = [column.name for column in serving.added]

    def column(name: str) -> Any:
        return functions.col("`" + name.replace("`", "``") + "`")

    features = travel.expressions(serving.groups, column, functions.array)
    # An operator that leaves every row as it is. Without one between a file and an Arrow UDF, Spark 4.2 and 4.3 hand
    # over columns as they are read from the file, and fail if there are vectors among the columns or the results. A
    # filter would not stay: Spark moves it to the files, and computes once more what it looks at.
    one = "_spark_elastic_one"
    rows = dataset.select("*", functions.explode(functions.array(functions.lit(0))).alias(one)).drop(one)
    # The names once more: the columns then differ from those of `dataset`, so that the two can be joined.
    return rows.select("*", functions.inline(made(*features)).alias(*added)).toDF(*serving.names, *added)


class ElasticModel(FeatureColumns, OutputParams, Savable, Model):
    """A trained model that adds its outputs to a DataFrame.

    `feature_cols` may be set to other names than those it was trained on, in the same grouping.
    """

    _native_name = "module"  # the attribute with the framework's own model
    _native: Any = None
    _fitted: Fitted | None = None
    fit_seconds: Mapping[str, float] = MappingProxyType({})
    """Seconds that the parts of the fit took: write, try, train, load. Not saved."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # By application and settings: the key of the executors' caches, and the broadcast. Copies share it.
        self._shipments: dict[tuple[Any, ...], tuple[str, Any]] = {}

    def _computing(self) -> tuple[Any, ...]:
        """Return the settings of the computation in `transform`."""
        return self._given("transform_device"), self._given("transform_threads")

    def _predictor(self) -> Callable[[], Predictor]:
        """Return the function that is sent to executors to load the model there."""
        raise NotImplementedError

    @property
    def history(self) -> History:
        """One row per epoch of the fit: {"epoch": 0, "loss": 0.3, ...}; `pandas.DataFrame(model.history)` works."""
        return self._facts_of_fit().history

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events of the workers during the fit, oldest first, as dicts. A value is None where it does not apply.

        - "seconds": time since the fit began; "time": since 1970.
        - "kind": "started", "joined", "lost" (a worker or its host failed), "left" (a worker ended in an orderly way),
          "drained" (its executor was decommissioned), "broken" (the world was rebuilt although no worker was lost),
          "waiting" (for workers), "resting" (a slot or host is not used for a while after failures), "notice" (a
          message of a worker), "finished" or "failed".
        - "who", "reason": in words.
        - "before", "after": numbers of workers.
        - "pause_s": time until the first step after the event; "steps_lost": steps that were repeated.
        - "text": all of it in one line.
        """
        return [dict(event) for event in self._facts_of_fit().events]

    @property
    def tensors(self) -> dict[str, list[dict[str, Any]]] | None:
        """The "inputs" and "outputs" of the framework's own model: name, dtype and shape of one row of each.

        None if `inference_fn` changes the inputs, or the model cannot be called with its inputs alone, or returns more
        than values for each row.
        """
        fitted = self._facts_of_fit()
        if self.getOrDefault("inference_fn") is not None or not fitted.outputs or fitted.output_positions:
            return None
        outputs = [(f"output_{index}", output) for index, output in enumerate(fitted.outputs)]
        sides: dict[str, Any] = {"inputs": [(each.name, each) for each in fitted.inputs], "outputs": outputs}
        return {
            side: [{"name": name, "dtype": each.dtype, "shape": list(each.shape)} for name, each in named]
            for side, named in sides.items()
        }

    def plot(self, path: str | Path | None = None) -> Any:
        """Plot loss and metrics over the epochs, with the number of workers and the faults on the same axis.

        Args:
            path: File to write the plot to; its suffix (.png, .svg, .pdf) is the format.

        Returns:
            A matplotlib Figure, which a notebook shows as the last value of a cell.

        Raises:
            MissingExtraError: matplotlib is not installed (extra `plot`).
        """
        return draw_training(self.history, self.events, path)

    def transformSchema(self, schema: Any) -> Any:
        """Return the schema of the DataFrame that `transform` returns.

        Raises:
            DataError: A column is missing, or an added one exists already.
            InvalidSettingsError: The output columns do not fit the model's outputs.
        """
        return self._schema_after(schema, case_sensitive=False)

    def _schema_after(self, schema: Any, case_sensitive: bool) -> Any:
        from pyspark.sql.types import StructField, StructType

        self._inputs(schema)
        added = self._added()
        same = str if case_sensitive else str.lower
        present = {same(name): name for name in schema.names}
        for column in added:
            if same(column.name) in present:
                setting = "output_cols" if column.made == "raw" else f"{column.made}_col"
                raise DataError(
                    f"the DataFrame has a column {present[same(column.name)]!r} already; give the output "
                    f"another name ({setting}), or drop the column first"
                )
        nullable = self.getOrDefault("handle_invalid") == "keep"
        return StructType([*schema.fields, *(StructField(c.name, spark_type(c), nullable) for c in added)])

    def _transform(self, dataset: Any) -> Any:
        case_sensitive = is_case_sensitive(dataset)
        schema = self._schema_after(dataset.schema, case_sensitive)
        inputs = self._inputs(dataset.schema)
        features = {name: dataset.schema[name].dataType for field in inputs for name in field.columns}
        cluster = cluster_of(dataset.sparkSession)
        cluster.check_executors()
        serving = self._serving(
            *self._shipped(cluster),
            dataset.schema,
            inputs,
            case_sensitive,
            names=tuple(dataset.columns),
            groups=travel.groups_of({name: kind.typeName() for name, kind in features.items()}),
        )
        if cluster.has_arrow_udfs():
            check_travels(features)
            return _with_udf(dataset, serving, cluster.functions)
        check_travels({field.name: field.dataType for field in dataset.schema.fields})

        def predictions(batches: Iterable[Any]) -> Iterable[Any]:
            return serving(batches)

        # pyspark looks the columns up by name, which fails for names with dots and for equal names. So they are renamed
        # on the way to the executors; the result's columns are matched by position.
        plain = dataset.toDF(*(f"column {index}" for index in range(len(dataset.columns))))
        return plain.mapInArrow(predictions, schema)

    def _serving(
        self, key: str, model: Any, schema: Any, inputs: tuple[TensorField, ...], case_sensitive: bool, **more: Any
    ) -> Serving:
        fitted = self._facts_of_fit()
        return Serving(
            key,
            model,
            tensors_for(schema, inputs, fitted.pad_to, fitted.allow_nan, case_sensitive),
            self._added(),
            batch_size=self.getOrDefault("transform_batch_size"),
            on_gpu=not self.getOrDefault("transform_device").startswith("cpu"),
            inference_fn=self.getOrDefault("inference_fn"),
            handle_invalid=self.getOrDefault("handle_invalid"),
            missing=fitted.missing,
            output_positions=fitted.output_positions,
            **more,
        )

    def predict(self, data: Any) -> Any:
        """Return the columns that `transform` adds, for rows of this process. Needs no SparkSession and no Java.

        Args:
            data: A pandas DataFrame or a pyarrow Table with the columns of the features. A vector may be a list, an
                array, or a vector of pyspark.

        Returns:
            The added columns: a DataFrame with the same index, or a Table. Arrays and vectors are arrays in it. With
            `handle_invalid="skip"` it lacks the rows that `transform` leaves out.

        Raises:
            DataError: A column is missing, or has values that the model does not take.
            InvalidSettingsError: `data` is something else, or the output columns do not fit the model's outputs.
        """
        if not tables.is_table(data):
            raise InvalidSettingsError(
                f"predict takes a pandas DataFrame or a pyarrow Table, not {type(data).__module__}."
                f"{type(data).__name__}; transform takes a Spark DataFrame"
            )
        inputs = self._inputs(tables.schema_of(data))
        batch, schema = tables.features(data, inputs)
        serving = self._serving(self.uid, None, schema, inputs, True, loaded=self._own_predictor())
        serving = dataclasses.replace(serving, added=tuple(each.plain() for each in serving.added))
        columns, kept = serving.in_this_process(batch)
        return tables.in_kind(data, [column.name for column in serving.added], columns, kept)

    def _own_predictor(self) -> Predictor:
        """Return the model as `predict` calls it, in this process."""
        raise NotImplementedError

    def _facts_of_fit(self) -> Fitted:
        if self._fitted is None:
            raise InvalidSettingsError(
                f"this {type(self).__name__} was not made by fit or load, and has no {self._native_name} and no "
                "history; call fit or load first"
            )
        return self._fitted

    def _inputs(self, schema: Any) -> tuple[TensorField, ...]:
        """Return the model's inputs with the columns that `feature_cols` names now."""
        inputs = self._facts_of_fit().inputs
        given = self.getOrDefault("feature_cols")
        if given is not None:
            groups = given if all(isinstance(each, list) for each in given) else [given]
            if len(inputs) > 1 and groups == [given]:
                groups = [[name] for name in given]
            counts, wanted = [len(group) for group in groups], [len(field.columns) for field in inputs]
            if counts != wanted:
                raise InvalidSettingsError(
                    f"feature_cols={given!r} has {counts} columns for the model's inputs, which take {wanted}"
                )
            inputs = tuple(
                dataclasses.replace(field, columns=tuple(g)) for field, g in zip(inputs, groups, strict=True)
            )
        for field in inputs:
            for name in field.columns:
                find_column(schema, name, "the model's input")
        return inputs

    def _added(self) -> tuple[AddedColumn, ...]:
        outputs = self._facts_of_fit().outputs
        if not outputs:
            raise InvalidSettingsError(
                f"the model cannot be called with its features alone: {self._facts_of_fit().why_not}; use "
                f"`{self._native_name}` itself"
            )
        names = self.getOrDefault("output_cols")
        if names is None:
            names = ["output"] if len(outputs) == 1 else [f"output_{index}" for index in range(len(outputs))]
        elif names and len(names) != len(outputs):
            raise InvalidSettingsError(f"{len(names)} output_cols for the {len(outputs)} outputs of the model: {names}")
        vectors = self.getOrDefault("output_type") == "vector"
        added = [
            AddedColumn(name, "raw", index, "", shape, vectors and len(shape.shape) == 1)
            for index, (name, shape) in enumerate(zip(names, outputs[: len(names)], strict=True))
        ]
        rule = self._rule(outputs[0])
        classes = outputs[0].shape if rule in BY_CLASS else (2,)
        kinds = (("prediction", ()), ("probability", classes), ("raw_prediction", classes))
        taken = [each.name for each in added]
        taken += [self.getOrDefault(f"{made}_col") for made, _ in kinds if self.isSet(f"{made}_col")]
        for made, shape in kinds:
            setting = f"{made}_col"
            if not (name := self.getOrDefault(setting)) or (not self.isSet(setting) and name in taken):
                continue
            vector = made != "prediction"
            if rule is not None and not (vector and rule in ("value", "sign")):
                added.append(AddedColumn(name, made, 0, rule, OutputShape("<f8", shape), as_vector=vector))
            elif self.isSet(setting):
                raise InvalidSettingsError(
                    f"{setting} is set, but it is not known how to make one of an output of shape "
                    f"{list(outputs[0].shape)}; set prediction to 'argmax', 'argmax_probability', 'binary_logit' or "
                    "'binary_probability'"
                )
        if not added:
            raise InvalidSettingsError(NOTHING_ADDED)
        return tuple(added)

    def _rule(self, output: OutputShape) -> str | None:
        chosen = self.getOrDefault("prediction")
        if chosen == "auto":
            return self._facts_of_fit().rule or ("value" if suits("value", output.shape) else None)
        if not suits(chosen, output.shape):
            raise InvalidSettingsError(
                f"prediction={chosen!r} does not go with the model's first output, whose rows have shape "
                f"{list(output.shape)}"
            )
        return str(chosen)

    def _shipped(self, cluster: Cluster) -> tuple[str, Any]:
        """Return cache key and broadcast of the model, sent once per application and way of computing."""
        about = (cluster.id, *self._computing())
        if about not in self._shipments:
            # Pickled here, too: Spark's own pickle would load the model in every worker that reads the broadcast.
            payload = dumps(self._predictor())
            try:
                shipped = cluster.send(payload)
            except Exception as error:  # of py4j, with the JVM's error in its words
                if "OutOfMemoryError" not in str(error):
                    raise
                raise InvalidSettingsError(
                    f"Spark's driver has no memory left for the model, of {len(payload) / 1e6:.0f} MB; raise "
                    "spark.driver.memory, which is set before the session starts. What other models have sent stays "
                    "there until they are garbage collected"
                ) from error
            self._shipments[about] = (uuid.uuid4().hex, shipped)
        return self._shipments[about]

    def _restore(self, facts: Mapping[str, Any], files: Mapping[str, bytes], objects: Mapping[str, Any]) -> None:
        self._fitted = Fitted.from_json(facts)

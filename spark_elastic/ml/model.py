"""ElasticModel: what a fit returns, whatever framework trained it. A Spark ML Transformer."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import cloudpickle
from pyspark.ml import Model

from spark_elastic.data.layout import Kind, TensorField
from spark_elastic.data.spark_jobs import refuse_connect
from spark_elastic.errors import DataError, InvalidSettingsError, nearest
from spark_elastic.ml.outputs import BY_CLASS, AddedColumn, OutputShape, rule_of_shape, spark_type, suits
from spark_elastic.ml.persistence import Savable
from spark_elastic.ml.serving import SavedPredictor, Serving, tensors_for
from spark_elastic.ml.shared_params import FeatureColumns, OutputParams
from spark_elastic.reporting.history import History
from spark_elastic.reporting.plot import draw_training


@dataclass(frozen=True)
class Fitted:
    """What was learnt beside the weights.

    inputs: of the model, and the columns they came from. outputs: of the model, one row. rule: how the loss makes a
    prediction of the first output; None: it has no say. history, events: of the fit. why_not: why the model cannot be
    called with its inputs alone, if it cannot. pad_to: lengths that arrays are filled up to, by input. allow_nan:
    inputs that may be NaN or infinite, or whether all may be.
    """

    inputs: tuple[TensorField, ...]
    outputs: tuple[OutputShape, ...]
    rule: str | None = None
    history: History = dataclasses.field(default_factory=History)
    events: tuple[Mapping[str, Any], ...] = ()
    why_not: str = ""
    pad_to: Mapping[str, int] = dataclasses.field(default_factory=dict)
    allow_nan: bool | Sequence[str] = False

    def to_json(self) -> dict[str, Any]:
        return {
            "inputs": [{**dataclasses.asdict(field), "kind": field.kind.value} for field in self.inputs],
            "outputs": [dataclasses.asdict(output) for output in self.outputs],
            "rule": self.rule,
            "history": self.history.to_json(),
            "events": [dict(event) for event in self.events],
            "why_not": self.why_not,
            "pad_to": dict(self.pad_to),
            "allow_nan": self.allow_nan if isinstance(self.allow_nan, bool) else list(self.allow_nan),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Fitted:
        inputs = (
            TensorField(
                each["name"],
                tuple(each["columns"]),
                each["dtype"],
                tuple(each["shape"]),
                each["offset"],
                Kind(each["kind"]),
            )
            for each in document["inputs"]
        )
        outputs = (OutputShape(each["dtype"], tuple(each["shape"])) for each in document["outputs"])
        history = History.from_json(document["history"])
        return cls(
            tuple(inputs),
            tuple(outputs),
            document["rule"],
            history,
            tuple(document["events"]),
            document["why_not"],
            document["pad_to"],
            document.get("allow_nan", False),
        )


class ElasticModel(FeatureColumns, OutputParams, Savable, Model):
    """A trained model that adds its outputs to a DataFrame.

    `feature_cols` may be set to other names than those it was trained on, in the same grouping.
    """

    NATIVE = "module"
    """The attribute with the framework's own model."""
    _fitted: Fitted | None = None
    fit_seconds: Mapping[str, float] = MappingProxyType({})
    """What the parts of the fit took: write, try, train, load. Not saved."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # By application and settings: the key of the executors' caches, and the broadcast. Copies have it in common.
        self._shipments: dict[tuple[Any, ...], tuple[str, Any]] = {}

    # What a framework adds.

    def _saved_predictor(self) -> SavedPredictor:
        """The model, for executors."""
        raise NotImplementedError

    # What users see.

    @property
    def history(self) -> History:
        """A row for each epoch of the fit: {"epoch": 0, "loss": 0.3, ...}. `pandas.DataFrame(model.history)` works."""
        return self._facts_of_fit().history

    @property
    def events(self) -> list[dict[str, Any]]:
        """What became of the workers during the fit, oldest first: a dict for each event.

        "seconds": since the fit began. "time": since 1970. "kind": "started", "lost", "drained", "left", "joined",
        "broken", "waiting", "resting", "notice" (a worker has something to say: a checkpoint could not be written),
        "finished" or "failed". "who", "reason": in words. "before", "after": workers. "pause_s": seconds until the
        first step after it was done. "steps_lost": that had to be done again. "text": all of it in a line. None where
        there is nothing to say.
        """
        return [dict(event) for event in self._facts_of_fit().events]

    def plot(self, path: str | Path | None = None) -> Any:
        """Loss and metrics over the epochs, with the number of workers and the faults on the same axis.

        path: a file to write it to as well; its ending (.png, .svg, .pdf) says how.
        Returns: a matplotlib Figure; as the last value of a notebook's cell it is shown.
        Raises: MissingExtraError: matplotlib is not installed (extra `plot`).
        """
        return draw_training(self.history, self.events, path)

    def transformSchema(self, schema: Any) -> Any:
        """The schema that `transform` gives for one.

        Raises:
            DataError: a column is missing, or an added one is there already.
            InvalidSettingsError: the output columns do not fit the model's outputs.
        """
        from pyspark.sql.types import StructField, StructType

        self._inputs(schema)
        added = self._added()
        present = {name.lower(): name for name in schema.names}  # Spark tells no columns apart by case alone
        for column in added:
            if column.name.lower() in present:
                raise DataError(
                    f"the DataFrame has a column {present[column.name.lower()]!r} already; give the output "
                    f"another name ({self._setting_of(column)}), or drop the column first"
                )
        nullable = self._handle_invalid() == "keep"
        return StructType([*schema.fields, *(StructField(c.name, spark_type(c), nullable) for c in added)])

    def _transform(self, dataset: Any) -> Any:
        refuse_connect(dataset)
        schema = self.transformSchema(dataset.schema)
        fitted = self._facts_of_fit()
        key, broadcast = self._shipped(dataset.sparkSession.sparkContext)
        serving = Serving(
            key=key,
            model=broadcast,
            inputs=tensors_for(dataset.schema, self._inputs(dataset.schema), fitted.pad_to, fitted.allow_nan),
            added=self._added(),
            batch_size=self.getOrDefault("transform_batch_size"),
            inference_fn=self.getOrDefault("inference_fn"),
            names=tuple(dataset.columns),
            handle_invalid=self._handle_invalid(),
        )

        def predictions(batches: Iterable[Any]) -> Iterable[Any]:
            return serving(batches)

        # pyspark looks the columns up by their names, in vain if there is a dot in one or two have the same. Coming
        # back they are taken by their places.
        plain = dataset.toDF(*(f"column {index}" for index in range(len(dataset.columns))))
        return plain.mapInArrow(predictions, schema)

    # How the settings and the model go together.

    def _facts_of_fit(self) -> Fitted:
        if self._fitted is None:
            raise InvalidSettingsError(f"this {type(self).__name__} was not made by a fit, and has nothing to show")
        return self._fitted

    def _inputs(self, schema: Any) -> tuple[TensorField, ...]:
        """The model's inputs with the columns that they come from now."""
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
                if name not in schema.names:
                    close = nearest(name, schema.names)
                    hint = f"did you mean {close!r}?" if close else f"it has {', '.join(schema.names)}"
                    raise DataError(f"the model needs a column {name!r}, which the DataFrame does not have; {hint}")
                if schema.names.count(name) > 1:
                    raise DataError(f"{name!r} stands for several columns of the DataFrame; rename all but one")
        return inputs

    def _added(self) -> tuple[AddedColumn, ...]:
        outputs = self._facts_of_fit().outputs
        if not outputs:
            raise InvalidSettingsError(
                f"the model cannot be called with its features alone: {self._facts_of_fit().why_not}; use "
                f"`{self.NATIVE}` itself"
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
        prediction, probability = self.getOrDefault("prediction_col"), self.getOrDefault("probability_col")
        if prediction and rule is not None:
            added.append(AddedColumn(prediction, "prediction", 0, rule, OutputShape("<f8", ())))
        elif prediction and self.isSet("prediction_col"):
            raise InvalidSettingsError(self._no_rule(outputs[0], "prediction_col"))
        if probability:
            if rule is None or rule == "value":
                raise InvalidSettingsError(self._no_rule(outputs[0], "probability_col"))
            classes = outputs[0].shape if rule in BY_CLASS else (2,)
            added.append(AddedColumn(probability, "probability", 0, rule, OutputShape("<f8", classes), as_vector=True))
        if not added:
            raise InvalidSettingsError(
                "transform has nothing to add: output_cols is [], and there is no prediction_col or probability_col"
            )
        return tuple(added)

    def _handle_invalid(self) -> str:
        return self.getOrDefault("handle_invalid") or "error"  # None, set by somebody, is no reason to drop rows

    def _rule(self, output: OutputShape) -> str | None:
        chosen = self.getOrDefault("prediction")
        if chosen == "auto":
            return self._facts_of_fit().rule or rule_of_shape(output.shape)
        if not suits(chosen, output.shape):
            raise InvalidSettingsError(
                f"prediction={chosen!r} does not go with the model's first output, whose rows have shape "
                f"{list(output.shape)}"
            )
        return str(chosen)

    def _no_rule(self, output: OutputShape, setting: str) -> str:
        return (
            f"{setting} is set, but there is no telling how a row of shape {list(output.shape)} becomes one; set "
            "prediction to 'argmax', 'argmax_probability', 'binary_logit' or 'binary_probability'"
        )

    def _setting_of(self, column: AddedColumn) -> str:
        return "output_cols" if column.made == "raw" else f"{column.made}_col"

    def _shipped(self, context: Any) -> tuple[str, Any]:
        """The key and the broadcast of the model; sent once for each application, device and number of threads."""
        about = (
            context.applicationId,
            *(self.getOrDefault(name) for name in ("transform_device", "transform_threads")),
        )
        if about not in self._shipments:
            # Two pickles: the outer one is Spark's, and must not load the model in every worker that reads the bytes.
            payload = cloudpickle.dumps(self._saved_predictor())
            self._shipments[about] = (uuid.uuid4().hex, context.broadcast(payload))
        return self._shipments[about]

    def _facts(self) -> dict[str, Any]:
        return self._facts_of_fit().to_json()

    def _restore(self, facts: Mapping[str, Any], files: Mapping[str, bytes], objects: Mapping[str, Any]) -> None:
        self._fitted = Fitted.from_json(facts)

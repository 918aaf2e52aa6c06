"""The facts of a fit that its model keeps beside the weights, and saves with them. Imports nothing of Spark."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spark_elastic.data.manifest import TensorField, names_in, tensor_field, typed, whole_number
from spark_elastic.errors import CheckpointError
from spark_elastic.ml.added_columns import OutputShape
from spark_elastic.reporting.history import History


@dataclass(frozen=True)
class Fitted:
    """The facts of a fit beside the weights."""

    inputs: tuple[TensorField, ...]  # the model's inputs, and the columns they came from
    outputs: tuple[OutputShape, ...]  # the model's outputs that have a value for each row, for one row
    rule: str | None = None  # the rule by which the loss makes a prediction of the first output; None if it has none
    history: History = dataclasses.field(default_factory=History)  # the epochs of the fit
    events: tuple[Mapping[str, Any], ...] = ()  # the events of the fit's workers
    why_not: str = ""  # why the model cannot be called with its inputs alone; "" if it can
    pad_to: Mapping[str, int] = dataclasses.field(default_factory=dict)  # lengths that arrays are padded to, by input
    allow_nan: bool | Sequence[str] = False  # inputs that may be NaN or infinite; True or False for all of them
    missing: float | None = None  # the number that took the place of missing values in training
    output_positions: tuple[int, ...] = ()  # their positions among all that the model returns; empty if they are all
    columns: Mapping[str, str] = dataclasses.field(default_factory=dict)  # Spark's types of those columns, if known

    def to_json(self) -> dict[str, Any]:
        plain = ("rule", "events", "why_not", "pad_to", "allow_nan", "missing", "output_positions", "columns")
        return {
            **{name: getattr(self, name) for name in plain},
            "inputs": [{**dataclasses.asdict(field), "kind": field.kind.value} for field in self.inputs],
            "outputs": [dataclasses.asdict(output) for output in self.outputs],
            "history": self.history.to_json(),
            "work": list(self.history.work),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Fitted:
        """Rebuild the facts from what `to_json` returned. Raises `CheckpointError`, with the field, for others."""
        allowed = document.get("allow_nan")
        try:
            outputs = [typed({"outputs": one}, "outputs", dict) for one in typed(document, "outputs", list)]
            # files of 0.2.0 have no positions
            listed = typed({"output_positions": [], **document}, "output_positions", list)
            missing = document.get("missing")
            positions = tuple(whole_number(each, "output_positions") for each in listed)
            columns = typed({"columns": {}, **document}, "columns", dict)  # nor have they these
            if positions and len(positions) != len(outputs):
                raise ValueError(f"output_positions has {len(positions)} positions for {len(outputs)} outputs")
            return cls(
                inputs=tuple(
                    tensor_field(each, f"inputs[{number}]")
                    for number, each in enumerate(typed(document, "inputs", list))
                ),
                outputs=tuple(
                    OutputShape(
                        typed(each, "dtype", str, "outputs."),
                        tuple(whole_number(size, "outputs.shape") for size in typed(each, "shape", list, "outputs.")),
                    )
                    for each in outputs
                ),
                rule=typed(document, "rule", str) if document.get("rule") is not None else None,
                history=History.from_json(document.get("history"), document.get("work")),
                events=tuple(typed({"events": each}, "events", dict) for each in typed(document, "events", list)),
                why_not=typed(document, "why_not", str),
                pad_to={
                    name: whole_number(length, "pad_to") for name, length in typed(document, "pad_to", dict).items()
                },
                allow_nan=allowed if isinstance(allowed, bool) else names_in(document, "allow_nan"),
                missing=None if missing is None else float(missing),
                output_positions=positions,
                columns={name: typed(columns, name, str, "columns.") for name in columns},
            )
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"the metadata of the saved model is damaged: {error}") from error

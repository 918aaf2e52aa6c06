"""A model's weights without the model, and back into one of the same architecture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spark_elastic.errors import CheckpointError
from spark_elastic.keras.variables import same_place
from spark_elastic.ml.keras import arrays
from spark_elastic.ml.keras.arrays import Array


def dumps(model: Any) -> bytes:
    """All weights of the model, also those that are not trained."""
    return arrays.dumps(named(model.weights))


def fill(model: Any, file: bytes) -> Any:
    """Give a built model the weights that `dumps` has written, and return it.

    Raises: CheckpointError: damaged, or of another architecture.
    """
    try:
        assign(model.weights, arrays.loads(file))
    except ValueError as error:
        raise CheckpointError(f"the saved weights do not fit {model.name}: {error}") from error
    return model


def named(variables: Sequence[Any], prefix: str = "") -> dict[str, Array]:
    """The values by number and path; paths alone need not differ. Copies, which later steps do not reach."""
    return {f"{prefix}{number}:{each.path}": each.numpy() for number, each in enumerate(variables)}


def assign(variables: Sequence[Any], values: Mapping[str, Array], prefix: str = "") -> None:
    """Take over what `named` has made, all of it or nothing.

    Raises: ValueError: they are other variables.
    """
    found = {
        int(number): (path, value)
        for name, value in values.items()
        if name.startswith(prefix)
        for number, _, path in [name[len(prefix) :].partition(":")]
        if number.isdigit()
    }
    if len(found) != len(variables):
        raise ValueError(f"there are {len(found)} arrays for {len(variables)} variables")
    for number, variable in enumerate(variables):
        path, value = found.get(number, ("nothing", None))
        if value is None or tuple(value.shape) != tuple(variable.shape) or not _same(path, variable.path):
            have = "" if value is None else f" {list(value.shape)}"
            raise ValueError(f"{path}{have} is not {variable.path} {list(variable.shape)}")
    for number, variable in enumerate(variables):
        variable.assign(found[number][1])


def _same(one: str, other: str) -> bool:
    """Whether two paths can be those of one variable: what its model is called need not be the same."""
    return same_place(one.rpartition("/")[2], other.rpartition("/")[2])

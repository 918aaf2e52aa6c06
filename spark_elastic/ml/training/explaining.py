"""Errors of users' code on the first rows, with what the code was called with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spark_elastic.errors import DataError, InvalidSettingsError, SparkElasticError


class explained:
    """A context in which the user's code runs.

    tensors: by name, those that it is called with.
    Raises: DataError: it raised something. InvalidSettingsError: as it is.
    """

    def __init__(self, what: str, rows: int, tensors: Mapping[str, Any]) -> None:
        self._what, self._rows, self._tensors = what, rows, tensors

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, at: Any) -> None:
        if error is None or not isinstance(error, Exception) or isinstance(error, InvalidSettingsError):
            return
        seen = ", ".join(f"{name} {described_tensor(value)}" for name, value in self._tensors.items())
        said = str(error) if isinstance(error, SparkElasticError) else f"{type(error).__name__}: {error}"
        raise DataError(
            f"{self._what} cannot deal with the first {self._rows} rows: {said}\nThe tensors were: {seen}. What does "
            "not fit can be changed by input_dtypes, input_shapes, label_shapes, the columns' types or a "
            "transformation_fn"
        ) from error


def described_tensor(value: Any) -> str:
    """Type and shape of a tensor or array; of anything else its type."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        dtype = getattr(value.dtype, "name", str(value.dtype)).removeprefix("torch.")
        return f"{dtype} {list(value.shape)}"
    return type(value).__name__

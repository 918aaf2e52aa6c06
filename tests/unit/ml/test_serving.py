"""What runs on executors in `transform`, on batches made here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest
import torch
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import ArrayType, DoubleType, StructField, StructType

from spark_elastic.collective.gpu.devices import DeviceInfo
from spark_elastic.data.manifest import TensorField
from spark_elastic.errors import DataError, InvalidSettingsError
from spark_elastic.ml import serving as serving_module
from spark_elastic.ml.added_columns import (
    AddedColumn,
    OutputShape,
    arrow_array,
    prediction,
    probability,
    raw_prediction,
    spark_type,
)
from spark_elastic.ml.serving import Serving, gpu_of_task, tensors_for
from spark_elastic.ml.torch import model as model_module
from spark_elastic.ml.torch.model import _load_predictor

SCHEMA = StructType([StructField("a", DoubleType()), StructField("v", ArrayType(DoubleType()))])
JOINED = TensorField("features_0", ("a", "v"), "<f4", (3,))


@dataclass
class Broadcast:
    value: bytes


@dataclass
class Adding:
    """A "model" that adds up its input, and remembers in a file how often it was loaded."""

    log: str

    def load(self) -> Any:
        with open(self.log, "a") as file:
            file.write("loaded ")
        return self

    def __call__(self, inputs: Mapping[str, Any]) -> list[Any]:
        return [inputs["features_0"].sum(axis=1)]


def batch(a: Any, v: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(a, pa.float64()), pa.array(v, pa.list_(pa.float64()))], ["a", "v"])


def serving(log: Any, key: str = "one", **more: Any) -> Serving:
    added = (AddedColumn("sum", "raw", 0, "", OutputShape("<f4", ())),)
    settings: dict[str, Any] = {"inputs": tensors_for(SCHEMA, [JOINED], {}), "batch_size": 2, **more}
    payload = Broadcast(cloudpickle.dumps(Adding(str(log)).load))
    return Serving(key, payload, added=added, **settings)


@dataclass
class Widening:
    """A "model" whose rows have as many values as the largest value of its batch."""

    def load(self) -> Any:
        return self

    def __call__(self, inputs: Mapping[str, Any]) -> list[Any]:
        features = inputs["features_0"]
        return [np.repeat(features[:, :1], int(features.max()), axis=1)]


@pytest.mark.parametrize("as_vector", [False, True])
def test_outputs_may_have_another_length_in_each_part(as_vector: bool) -> None:
    added = (AddedColumn("wide", "raw", 0, "", OutputShape("<f4", (3,)), as_vector),)
    payload = Broadcast(cloudpickle.dumps(Widening().load))
    work = Serving(f"wide {as_vector}", payload, tensors_for(SCHEMA, [JOINED], {}), added, batch_size=2)
    (made,) = work([batch([1, 2, 3], [[0, 0]] * 3)])
    found = made.column("wide").to_pylist()
    assert [each["values"] if as_vector else each for each in found] == [[1, 1], [2, 2], [3, 3, 3]]


NAN, INF = float("nan"), float("inf")
BAD = [
    batch([1, None, 3, 4, NAN, 6], [[1, 1], [2, 2], None, [None, 4], [5, 5], [6, 6]]),
    batch([7, INF, 9], [[7, 7], [8, 8], [9, NAN]]),
    batch([None, NAN], [[1, 1], [2, 2]]),
]


def test_rows_with_missing_values_are_an_error_skipped_or_null(tmp_path: Any) -> None:
    log = tmp_path / "log"
    made = list(serving(log, handle_invalid="skip")(BAD))
    assert [each.column("sum").to_pylist() for each in made] == [[3, 18], [21], []]
    assert [each.column("a").to_pylist() for each in made] == [[1, 6], [7], []]
    made = list(serving(log, handle_invalid="keep")(BAD))
    assert [each.column("sum").to_pylist() for each in made] == [[3, *[None] * 4, 18], [21, None, None], [None] * 2]
    assert made[0].column("v").equals(BAD[0].column("v"))
    assert all(each.schema.field("sum").nullable for each in made)
    for bad, said in ((BAD[0], "column 'a': 1 of 6 rows read have null"), (BAD[1], "have NaN or infinity")):
        with pytest.raises(DataError, match=f"{said}.*handle_invalid='skip'"):
            list(serving(log)([bad]))
    allowed = serving(log, handle_invalid="skip", inputs=tensors_for(SCHEMA, [JOINED], {}, ["features_0"]))
    assert [each.num_rows for each in allowed(BAD)] == [3, 3, 1]


def nan_for_two(features: dict[str, Any]) -> dict[str, Any]:
    return {"features_0": np.where(features["features_0"] == 2, NAN, features["features_0"])}


def test_a_row_whose_output_is_nan_gets_no_class(tmp_path: Any) -> None:
    column = AddedColumn("class", "prediction", 0, "binary_logit", OutputShape("<f8", ()))
    settings = {"added": (column,), "inference_fn": nan_for_two, "batch_size": 1}
    given = batch([1, 2, 3], [[1, 1], [2, 2], [3, 3]])

    def classes(**more: Any) -> Any:
        work = replace(serving(tmp_path / "log"), **settings, **more)
        return [row for each in work([given]) for row in each.column("class").to_pylist()]

    assert classes(handle_invalid="skip") == [1.0, 1.0]
    assert classes(handle_invalid="keep") == [1.0, None, 1.0]
    with pytest.raises(DataError, match=r"first output is NaN for 1 of 3 rows.*handle_invalid"):
        classes()


# --- predictions, probabilities, and the Arrow arrays of output columns -------------------------------


def column(dtype: str, shape: tuple[int, ...], **more: Any) -> AddedColumn:
    return AddedColumn("output", "raw", 0, "", OutputShape(dtype, shape), **more)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [("value", [-0.25, 0.75]), ("sign", [-1, 1]), ("binary_logit", [0, 1]), ("binary_probability", [0, 1])],
)
@pytest.mark.parametrize("shape", [(2,), (2, 1)])
def test_single_value_is_the_prediction_or_compared_with_a_threshold(rule: str, expected: Any, shape: Any) -> None:
    made = prediction(np.array([-0.25, 0.75], "f4").reshape(shape), rule)
    assert made.dtype == np.float64
    assert made.tolist() == expected


def test_probabilities_add_up_to_one_also_for_huge_logits() -> None:
    made = probability(np.array([[1e4, 0], [0, 0]], "f4"), "argmax")
    assert made.tolist() == [[1, 0], [0.5, 0.5]]
    binary = probability(np.array([[-1e4], [0], [1e4]], "f4"), "binary_logit")
    assert binary.tolist() == [[1, 0], [0.5, 0.5], [0, 1]]
    assert probability(np.array([0.25]), "binary_probability").tolist() == [[0.75, 0.25]]


@pytest.mark.parametrize(
    ("rule", "output", "expected"),
    [
        ("argmax", [[3.0, -1.0]], [[3.0, -1.0]]),
        ("argmax_probability", [[0.75, 0.25]], [[0.75, 0.25]]),
        ("binary_logit", [[2.0], [-0.5]], [[-2.0, 2.0], [0.5, -0.5]]),
        ("binary_logit", [2.0, -0.5], [[-2.0, 2.0], [0.5, -0.5]]),
        ("binary_probability", [0.25], [[0.75, 0.25]]),
    ],
)
def test_raw_prediction_is_a_score_for_each_class(rule: str, output: Any, expected: Any) -> None:
    made = raw_prediction(np.array(output, "f4"), rule)
    assert made.tolist() == expected


@pytest.mark.parametrize("dtype", ["<f2", "<f4", "<f8", "|i1", "<i4", "<i8", "|u1", "|b1"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
@pytest.mark.parametrize("rows", [0, 4])
def test_the_arrow_type_is_the_one_that_spark_expects_for_the_column(dtype: str, shape: Any, rows: int) -> None:
    values = np.ones((rows, *shape), dtype)
    made = arrow_array(column(dtype, shape), values)
    assert made.type == to_arrow_type(spark_type(column(dtype, shape)))
    assert made.to_pylist() == values.tolist()


def test_output_with_another_number_of_axes_than_in_fit_is_refused() -> None:
    with pytest.raises(DataError, match=r"has shape \[5, 2\] here; when it was fitted, a row had shape \[\]"):
        column("<f4", ()).values([np.zeros((5, 2))])


# --- rows of a batch, memory, and GPUs ------------------------------------------------------------------


@dataclass
class Limited:
    """A "model" with memory for a few rows, that remembers the rows of each call."""

    most: int
    calls: list[int] = field(default_factory=list)
    rows: int = 4

    def load(self) -> Any:
        return self

    def __call__(self, inputs: Mapping[str, Any]) -> list[Any]:
        features = inputs["features_0"]
        self.calls.append(len(features))
        if len(features) > self.most:
            raise MemoryError(f"CUDA out of memory for {len(features)} rows")
        return [features.sum(axis=1)]


MODELS: dict[str, Limited] = {}


def known(name: str) -> Limited:
    return MODELS[name]


def limited(name: str, model: Limited, **more: Any) -> Serving:
    MODELS[name] = model
    payload = Broadcast(cloudpickle.dumps(partial(known, name)))
    added = (AddedColumn("sum", "raw", 0, "", OutputShape("<f4", ())),)
    return Serving(name, payload, tensors_for(SCHEMA, [JOINED], {}), added, **more)


def sums(work: Serving, rows: int) -> Any:
    (made,) = work([batch(range(rows), [[0, 1]] * rows)])
    return made.column("sum").to_pylist()


def test_rows_that_do_not_fit_memory_are_halved_and_none_is_left_out() -> None:
    model = Limited(most=3)
    assert sums(limited("few", model, batch_size=13), 14) == [1.0 + row for row in range(14)]
    assert model.calls == [13, 6, *[3] * 4, 2]
    model.calls.clear()
    sums(limited("few", model, batch_size=13), 4)  # a later partition begins with what fitted
    assert model.calls == [3, 1]


def test_a_row_that_does_not_fit_memory_alone_is_an_error_with_remedies() -> None:
    with pytest.raises(InvalidSettingsError, match=r"out of memory for 1 rows.*transform_device='cpu'"):
        sums(limited("none", Limited(most=0)), 2)


def test_a_batch_has_the_predictors_rows_unless_they_are_too_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Limited(most=100)
    sums(limited("plain", model), 10)
    monkeypatch.setattr(serving_module, "BATCH_BYTES", 3 * 3 * 4 + 1)  # of three values of float32
    sums(limited("wide", model), 7)
    sums(limited("given", model, batch_size=6), 7)
    assert model.calls == [4, 4, 2, 3, 3, 1, 6, 1]


def test_a_model_is_loaded_once_for_each_gpu_that_a_task_is_given(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[str] = []
    monkeypatch.setattr(serving_module, "accelerators_in_task", lambda: tuple(given))
    for on_gpu, loads in ((True, 2), (False, 1)):
        log = tmp_path / f"{on_gpu}"
        for addresses in (["0"], ["1"], ["1"]):
            given[:] = addresses
            list(serving(log, f"gpu {on_gpu}", on_gpu=on_gpu)([batch([1], [[1, 1]])]))
        assert log.read_text().split() == ["loaded"] * loads


@pytest.mark.parametrize(
    ("given", "visible", "number"), [(("2",), None, 2), (("2",), "5,2", 1), (("GPU-7",), "GPU-8,GPU-7", 1)]
)
def test_transform_uses_the_gpu_that_spark_has_given_the_task(
    given: Any, visible: Any, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving_module, "accelerators_in_task", lambda: given)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_of_task(2 if visible else 4) == (number, "given to the task")


def test_auto_is_the_cpu_without_a_gpu_and_no_memory_is_a_memory_error() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    module = torch.nn.Linear(2, 1)
    predictor = _load_predictor(module, "auto", 1, None)
    assert predictor.rows == 512
    rows = np.ones((3, 2), np.float32)
    assert predictor({"features_0": rows})[0].tolist() == module(torch.from_numpy(rows)).tolist()
    module.forward = forward  # type: ignore[assignment]
    with pytest.raises(MemoryError, match="Tried to allocate 2"):
        predictor({"features_0": rows})
    with pytest.raises(InvalidSettingsError, match="transform_device='cuda' cannot be used on this executor"):
        _load_predictor(module, "cuda", 1, None)


def test_auto_is_the_cpu_with_a_gpu_that_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(model_module, "device_info", lambda: DeviceInfo("2.9", "12.6", 1))
    assert _load_predictor(torch.nn.Linear(2, 1), "auto", 1, None).rows == 512
    assert "transform computes on the CPU, because the GPU cannot be used: Torch not compiled with CUDA" in caplog.text


@pytest.mark.parametrize(("amp", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_transform_in_half_precision_gives_the_outputs_of_autocast_in_full_precision(amp: str, dtype: Any) -> None:
    module, rows = torch.nn.Linear(8, 2), torch.randn(3, 8)
    with torch.autocast("cpu", dtype):
        expected = module(rows)
    (found,) = _load_predictor(module, "cpu", 1, amp)({"features_0": rows.numpy()})
    assert found.dtype == np.float32
    assert found.tolist() == expected.float().tolist()
    assert found.tolist() != module(rows).tolist()

"""`predict` and `load_module`: a trained model in a process without Spark."""

from __future__ import annotations

import datetime
import decimal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from pyspark.ml.linalg import Vectors
from torch import nn

from spark_elastic import ElasticTorchModel, load_module
from spark_elastic.data.manifest import Kind, TensorField
from spark_elastic.errors import CheckpointError, DataError, InvalidSettingsError
from spark_elastic.ml.added_columns import OutputShape
from spark_elastic.ml.fitted import Fitted
from tests.unit.ml.torch.estimators import estimator, make_set

JOINED = TensorField("features_0", ("a", "v"), "<f4", (3,))


def model_of(module: nn.Module, *inputs: TensorField, output: OutputShape, **settings: Any) -> Any:
    facts = {name: settings.pop(name) for name in ("pad_to", "allow_nan", "rule", "missing") if name in settings}
    made = ElasticTorchModel(**settings)
    made._attach(module, Fitted(inputs, (output,), **facts))
    return made


VECTORS = [Vectors.dense([1.0, 10.0]), Vectors.sparse(2, {1: 20.0}), Vectors.dense([3.0, 30.0])]
FRAMES = {
    "lists": pd.DataFrame({"v": [[1.0, 10.0], [0.0, 20.0], [3.0, 30.0]], "a": [0.5, 1.5, 2.5]}, index=[7, 3, 5]),
    "arrays": pd.DataFrame({"v": list(np.array([[1, 10], [0, 20], [3, 30]])), "a": [0.5, 1.5, 2.5]}, index=[7, 3, 5]),
    "vectors": pd.DataFrame({"v": VECTORS, "a": [0.5, 1.5, 2.5]}, index=[7, 3, 5]),
}


@pytest.mark.parametrize("kind", [*FRAMES, "table"])
def test_predictions_of_a_frame_or_table_are_what_the_module_gives(kind: str) -> None:
    torch.manual_seed(1)
    module = nn.Linear(3, 4)
    settings = {"rule": "argmax", "probability_col": "chances", "output_type": "vector", "transform_batch_size": 2}
    model = model_of(module, JOINED, output=OutputShape("<f4", (4,)), **settings)
    given = pa.Table.from_pandas(FRAMES["lists"], preserve_index=False) if kind == "table" else FRAMES[kind]
    made = model.predict(given)
    with torch.no_grad():
        logits = module(torch.tensor([[0.5, 1, 10], [1.5, 0, 20], [2.5, 3, 30]])).numpy()
    if kind == "table":
        assert isinstance(made, pa.Table)
        made = made.to_pandas()
    else:
        assert list(made.index) == [7, 3, 5]
    assert list(made.columns) == ["output", "prediction", "chances", "rawPrediction"]
    assert np.allclose(np.stack(list(made["output"])), logits, atol=1e-6)
    assert made["prediction"].tolist() == logits.argmax(1).tolist()
    assert np.allclose(np.stack(list(made["chances"])), torch.softmax(torch.from_numpy(logits), 1), atol=1e-6)


@pytest.mark.parametrize("kind", [Kind.DENSE, Kind.SPARSE])
def test_wide_vectors_may_be_sparse_dense_or_lists_whatever_they_were_in_training(kind: Kind) -> None:
    wide = 5000
    rows = np.zeros((3, wide), np.float32)
    rows[[0, 1, 2], [7, 8, 4999]] = 1.5, 2.5, 3.5
    inputs = TensorField("features_0", ("x",), "<f4", (wide,), kind=kind)
    model = model_of(nn.Identity(), inputs, output=OutputShape("<f4", (wide,)))
    sparse = [Vectors.sparse(wide, {int(row.argmax()): float(row.max())}) for row in rows]
    for values in (sparse, [Vectors.dense(row) for row in rows], [row.tolist() for row in rows]):
        assert np.array_equal(np.stack(list(model.predict(pd.DataFrame({"x": values}))["output"])), rows)


def frames_of_all_types(count: int) -> tuple[pd.DataFrame, pa.Table, list[list[float]]]:
    """The same columns as pandas and as Arrow have them, and their numbers, row by row."""
    numbers = np.arange(count)
    when = [datetime.datetime(1970, 1, 1) + datetime.timedelta(seconds=int(each)) for each in numbers]
    columns: dict[str, Any] = {
        "byte": numbers.astype(np.int8),
        "unsigned": numbers.astype(np.uint16),
        "long": numbers,
        "half": numbers.astype(np.float16),
        "double": numbers / 4,
        "boolean": numbers % 2 == 0,
        "decimal": [decimal.Decimal(int(each)) / 4 for each in numbers],
        "time": when,
        "nullable": pd.array(numbers, dtype="Int64"),
        "array": [[float(each), 2.0] for each in numbers],
        "of arrays": [np.array([[each, 2], [3, 4]]) for each in numbers],
    }
    frame = pd.DataFrame(columns)
    tables = {**columns, "of arrays": [each.tolist() for each in columns["of arrays"]]}
    fixed = pa.array(columns["array"], pa.list_(pa.float64(), 2))
    table = pa.table({**tables, "array": fixed, "unsigned": pa.array(columns["unsigned"]).dictionary_encode()})
    expected = [[n, n, n, n, n / 4, n % 2 == 0, n / 4, n * 1e6, n, n, 2, n, 2, 3, 4] for n in range(count)]
    return frame, table, expected


def test_features_of_all_types_have_the_values_that_spark_would_send() -> None:
    frame, table, expected = frames_of_all_types(9)
    inputs = TensorField("features_0", tuple(frame.columns), "<f8", (15,))
    model = model_of(nn.Identity(), inputs, output=OutputShape("<f8", (15,)))
    for given in (frame, table, table.to_batches()[0]):
        made = model.predict(given)
        rows = made["output"].tolist() if given is frame else made.column("output").to_pylist()
        assert [list(row) for row in rows] == expected


class Lengths(nn.Module):
    def forward(self, texts: Any) -> torch.Tensor:
        return torch.as_tensor(texts)


def lengths(features: dict[str, Any]) -> dict[str, Any]:
    return {
        "lengths": np.array(
            [len(text) + len(more) + 100 * len(own) for text, more, own in zip(*features.values(), strict=True)]
        )
    }


def test_texts_bytes_and_ragged_arrays_go_through_the_inference_fn() -> None:
    inputs = (
        TensorField("features_0", ("text",), "|u1", (), kind=Kind.STRING),
        TensorField("features_1", ("more",), "|u1", (), kind=Kind.BYTES),
        TensorField("features_2", ("own",), "<f4", (), kind=Kind.ARRAY),
    )
    model = model_of(Lengths(), *inputs, output=OutputShape("<i8", ()), inference_fn=lengths)
    frame = pd.DataFrame({"text": ["ab", "ç", ""], "more": [b"1", b"", b"123"], "own": [[1.0], [], [1.0, 2.0]]})
    assert model.predict(frame)["output"].tolist() == [103, 1, 203]
    categories = frame.assign(text=frame["text"].astype("category"))
    assert model.predict(categories.iloc[1:])["output"].tolist() == [1, 203]


def test_arrays_are_padded_and_infinity_is_let_in_as_in_training() -> None:
    field = TensorField("features_0", ("x",), "<f4", (3,))
    model = model_of(nn.Identity(), field, output=OutputShape("<f4", (3,)), pad_to={"features_0": 3}, allow_nan=True)
    made = model.predict(pd.DataFrame({"x": [[1.0], [float("inf"), 3.0]]}))["output"]
    assert np.stack(list(made)).tolist() == [[1, 0, 0], [float("inf"), 3, 0]]


def test_rows_with_missing_values_are_an_error_skipped_or_null() -> None:
    frame = pd.DataFrame({"a": [1.0, float("nan"), 3.0], "v": [[1.0, 1.0], [2.0, 2.0], None]}, index=["x", "y", "z"])
    model = model_of(nn.Identity(), JOINED, output=OutputShape("<f4", (3,)), output_cols=["o"], prediction_col="")
    with pytest.raises(DataError, match=r"column 'v': 1 of 3 rows read have null.*handle_invalid='skip'"):
        model.predict(frame)
    model.setHandleInvalid("keep")
    assert [None if row is None else list(row) for row in model.predict(frame)["o"]] == [[1, 1, 1], None, None]
    model.setHandleInvalid("skip")
    assert list(model.predict(frame).index) == ["x"]
    assert model.predict(pa.Table.from_pandas(frame)).column("o").to_pylist() == [[1, 1, 1]]
    assert model.predict(frame.iloc[:0]).shape == (0, 1)
    nothing = pd.DataFrame({"a": [None], "v": [None]})
    assert model.setHandleInvalid("keep").predict(nothing)["o"].tolist() == [None]


def test_number_in_place_of_missing_values_is_that_of_the_training() -> None:
    frame = pd.DataFrame({"a": [float("nan"), 3.0], "v": [[1.0, 1.0], [None, 2.0]]})
    model = model_of(nn.Identity(), JOINED, output=OutputShape("<f4", (3,)), missing=-1.5)
    assert np.stack(list(model.predict(frame)["output"])).tolist() == [[-1.5, 1, 1], [3, -1.5, 2]]


@pytest.mark.parametrize("handle_invalid", ["skip", "keep"])
def test_chunk_without_a_complete_row_has_the_types_of_the_others(handle_invalid: str) -> None:
    frame = pd.DataFrame({"a": [1.0] * 10_000 + [float("nan")], "v": [[1.0, 1.0]] * 10_001})
    settings = {"rule": "argmax", "handle_invalid": handle_invalid}
    made = model_of(nn.Identity(), JOINED, output=OutputShape("<f4", (3,)), **settings).predict(frame)
    assert len(made) == 10_000 + (handle_invalid == "keep")
    assert made["rawPrediction"].notna().sum() == 10_000


def test_default_column_gives_way_to_one_that_was_named_so() -> None:
    settings = {"rule": "argmax", "output_cols": ["probability"]}
    made = model_of(nn.Identity(), JOINED, output=OutputShape("<f4", (3,)), **settings).predict(FRAMES["lists"])
    assert list(made.columns) == ["probability", "prediction", "rawPrediction"]
    assert list(made["probability"].iloc[0]) == [0.5, 1, 10]


def test_what_cannot_be_predicted_is_an_error_that_names_the_column() -> None:
    model = model_of(nn.Identity(), JOINED, output=OutputShape("<f4", (3,)))
    good = FRAMES["lists"]
    with pytest.raises(DataError, match=r"'v' is not a column of the DataFrame; it has a"):
        model.predict(good[["a"]])
    with pytest.raises(DataError, match="3 for a shape of"):
        model.predict(good.assign(v=[[1.0], [2.0], [3.0]]))
    with pytest.raises(DataError, match=r"column 'a' is of type string, and the model was trained on values of <f4"):
        model.predict(good.assign(a=["1", "2", "3"]))
    with pytest.raises(DataError, match=r"column 'a': its values of type object cannot be read"):
        model.predict(good.assign(a=[1.0, "2", object()]))
    with pytest.raises(DataError, match=r"column 'v' is of type list<.*string>, which cannot be stored"):
        model.predict(good.assign(v=[["a"], ["b"], ["c"]]))
    with pytest.raises(InvalidSettingsError, match=r"not builtins.list; transform takes a Spark DataFrame"):
        model.predict([[1.0]])


# --- files, without Spark -----------------------------------------------------------------------

BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pyspark", "py4j"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
import numpy as np
import spark_elastic
"""


def without_pyspark(program: str, *args: str) -> str:
    """Run a program in a process that cannot import pyspark; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED + program, *args], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model, and the folder that it is saved in; there is no SparkSession."""
    folder = tmp_path_factory.mktemp("trained")
    model = estimator(epochs=1).from_dataset_path(make_set(folder / "set"))
    model.save(str(folder / "model"))
    return model, folder / "model"


def test_module_is_loaded_where_pyspark_cannot_be_imported(trained: Any) -> None:
    model, folder = trained
    program = (
        "import torch\n"
        "module = spark_elastic.load_module(sys.argv[1])\n"
        "assert not module.training\n"
        "print(module(torch.ones(1, 6)).tolist())"
    )
    with torch.no_grad():
        expected = model.module(torch.ones(1, 6)).tolist()
    for path in (str(folder), f"file://{folder}"):
        assert without_pyspark(program, path).strip() == str(expected)


def test_keras_model_is_loaded_where_pyspark_cannot_be_imported(tmp_path: Path) -> None:
    pytest.importorskip("keras")
    pytest.importorskip("tensorflow")
    from tests.unit.ml.keras.estimators import estimator as keras_estimator

    model = keras_estimator(epochs=1).from_dataset_path(make_set(tmp_path / "set"))
    model.save(str(tmp_path / "model"))
    program = "print(np.asarray(spark_elastic.load_module(sys.argv[1])(np.ones((1, 6), np.float32))).tolist())"
    ones = np.ones((1, 6), np.float32)
    expected = np.asarray(model.keras_model(ones))
    assert np.allclose(eval(without_pyspark(program, str(tmp_path / "model"))), expected, atol=1e-6)
    frame = pd.DataFrame({"x": list(np.ones((2, 6)))})
    loaded = type(model).load(str(tmp_path / "model")).setFeatureCols("x")
    for _ in range(2):  # the second call finds what the first has traced
        assert np.allclose(np.stack(list(loaded.predict(frame)["output"])), np.repeat(expected, 2, 0), atol=1e-6)
    with pytest.raises(InvalidSettingsError, match="holds a Keras model, which takes no module"):
        load_module(tmp_path / "model", module=nn.Identity())


def test_model_is_saved_loaded_and_predicts_without_a_session(trained: Any) -> None:
    model, folder = trained
    loaded = type(model).load(str(folder))
    frame = pd.DataFrame({"x": list(np.eye(6))})
    loaded.setFeatureCols("x")
    with torch.no_grad():
        expected = model.module(torch.eye(6)).numpy()
    made = loaded.predict(frame)
    assert np.allclose(np.stack(list(made["output"])), expected, atol=1e-6)
    assert made["prediction"].tolist() == expected.argmax(1).tolist()
    with pytest.raises(CheckpointError, match=r"none does not exist on this machine"):
        type(model).load(str(folder / "none"))


class OwnNet(nn.Linear):
    """A class that a saved model names, and that needs trust."""


def test_module_of_an_own_class_needs_trust_or_the_module(tmp_path: Path) -> None:
    module = OwnNet(3, 2)
    settings = {"output": OutputShape("<f4", (2,)), "inference_fn": lambda features: features}
    model_of(module, JOINED, **settings).save(str(tmp_path / "model"))
    with pytest.raises(CheckpointError, match=r"architecture in .* can only be loaded by running code"):
        load_module(tmp_path / "model")
    loaded = load_module(str(tmp_path / "model"), trusted=True)
    assert type(loaded) is OwnNet
    assert torch.equal(loaded.weight, module.weight)
    filled = load_module(tmp_path / "model", module=OwnNet(3, 2))
    assert torch.equal(filled.bias, module.bias), "the inference_fn, which is code, is not loaded"
    with pytest.raises(InvalidSettingsError, match="holds a PyTorch model, which takes no custom_objects"):
        load_module(tmp_path / "model", custom_objects={})


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.last = nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))


def test_weights_are_saved_as_safetensors_beside(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    module = Tied()
    model_of(module, JOINED, output=OutputShape("<f4", (4,))).save(str(tmp_path / "model"))
    found = safetensors.load_file(tmp_path / "model" / "data" / "weights.safetensors")
    state = module.state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)
    (tmp_path / "model" / "data" / "weights.safetensors").unlink()
    loaded = load_module(tmp_path / "model", trusted=True)
    assert torch.equal(loaded.first.weight, module.first.weight)

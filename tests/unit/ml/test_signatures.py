"""The estimators' signatures say what the declarations of the settings say, and type checkers understand them."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from pyspark.ml.param import Param

from spark_elastic import ElasticKerasEstimator, ElasticTorchEstimator
from spark_elastic.ml.estimator import ElasticEstimator

ROOT = Path(__file__).parents[3]
ESTIMATORS = [ElasticTorchEstimator, ElasticKerasEstimator]


def signature_of(kind: type) -> dict[str, inspect.Parameter]:
    """Return the parameters of the constructor by name; their annotations are strings."""
    return {name: each for name, each in inspect.signature(kind.__init__).parameters.items() if name != "self"}


def declared_in(kind: type) -> dict[str, Any]:
    """Return the Params of a class by name, those of the class itself before those of its bases."""
    return {
        name: value for base in reversed(kind.__mro__) for name, value in vars(base).items() if isinstance(value, Param)
    }


def annotation_of(kind: type, name: str) -> str:
    """Return T of the annotation `Param[T]` that the class, or its nearest base, has for a setting."""
    found = next(own[name] for base in kind.__mro__ if name in (own := inspect.get_annotations(base)))
    inner = re.fullmatch(r"Param\[(.*)\]", found, re.DOTALL)
    assert inner, f"{name}: {found}"
    return inner[1]


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_signature_has_every_setting_with_its_type_and_default(kind: type) -> None:
    signature, declared = signature_of(kind), declared_in(kind)
    assert sorted(signature) == sorted(declared)
    for name, parameter in signature.items():
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert parameter.default == declared[name].default, name
        assert parameter.annotation == annotation_of(kind, name), name


def test_estimators_have_the_common_settings_in_the_same_order() -> None:
    common = set(declared_in(ElasticEstimator))
    torch, keras = ([name for name in signature_of(kind) if name in common] for kind in ESTIMATORS)
    assert torch == keras


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_set_params_has_the_signature_of_the_constructor(kind: Any) -> None:
    assert inspect.signature(kind.setParams).parameters == inspect.signature(kind.__init__).parameters


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_every_setting_has_a_getter_and_a_setter(kind: Any) -> None:
    for name in declared_in(kind):
        ending = "".join(part.capitalize() for part in name.split("_"))
        assert f"`{name}`" in getattr(kind, f"get{ending}").__doc__
        assert f"`{name}`" in getattr(kind, f"set{ending}").__doc__


SCRIPT = """\
from pyspark.ml.tuning import ParamGridBuilder
from pyspark.sql import DataFrame
from spark_elastic import ElasticKerasEstimator, ElasticKerasModel, ElasticTorchEstimator, ElasticTorchModel
from spark_elastic.ml.callbacks import EarlyStopping
def use(df: DataFrame) -> None:
    estimator = ElasticTorchEstimator(feature_cols=["a"], label_cols=["b"], epochs=3, callbacks=[EarlyStopping()])
    model: ElasticTorchModel = estimator.setParams(batch_size=64).setEpochs(5).fit(df)
    models: list[ElasticTorchModel] = estimator.fit(df, ParamGridBuilder().addGrid(estimator.epochs, [1, 2]).build())
    again: ElasticTorchModel = estimator.from_dataset_path("/data")
    keras: ElasticKerasModel = ElasticKerasEstimator(loss="mse", validation="held_out", store="/shared").fit(df)
    result: DataFrame = model.transform(df)
    epochs: int = estimator.getEpochs()
"""
MISTAKES = {
    "ElasticTorchEstimator(epoch=3)": 'Unexpected keyword argument "epoch"',
    'ElasticTorchEstimator(epochs="3")': 'Argument "epochs" to "ElasticTorchEstimator" has incompatible type "str"',
    'ElasticKerasEstimator(gradient_compression="int8")': "incompatible type \"Literal['int8']\"",
    "ElasticKerasEstimator(train_fn=len)": 'Unexpected keyword argument "train_fn"',
    'ElasticTorchEstimator("model")': "Too many positional arguments",
    "ElasticTorchEstimator().setParams(epoch=3)": 'Unexpected keyword argument "epoch" for "setParams"',
    'ElasticTorchEstimator().setEpochs("3")': 'incompatible type "str"; expected "int"',
    "ElasticTorchEstimator().setEpoch(3)": 'has no attribute "setEpoch"',
    'ElasticTorchEstimator().fit("df")': 'No overload variant of "fit"',
}


def test_mypy_accepts_a_users_script_and_finds_its_mistakes(tmp_path: Path) -> None:
    api = pytest.importorskip("mypy.api")
    script, settings = tmp_path / "script.py", tmp_path / "mypy.ini"
    script.write_text(SCRIPT + "\n".join(MISTAKES) + "\n")
    # PyTorch takes minutes, and is not what is checked.
    settings.write_text(
        f"[mypy]\nmypy_path = {ROOT}\nignore_missing_imports = True\nfollow_imports = silent\n"
        "[mypy-torch.*,tensorflow.*,keras.*,pandas.*,numpy.*]\nfollow_imports = skip\n"
    )
    cache = ROOT / ".mypy_cache" / "user_script"
    found, errors, _ = api.run(["--config-file", str(settings), "--cache-dir", str(cache), str(script)])
    assert errors == ""
    reported = {int(number): said for number, said in re.findall(r"script\.py:(\d+): error: (.*)", found)}
    first = SCRIPT.count("\n") + 1
    assert sorted(reported) == list(range(first, first + len(MISTAKES))), found
    for number, said in enumerate(MISTAKES.values(), start=first):
        assert said in reported[number]

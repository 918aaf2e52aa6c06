"""The estimators' signatures say what the declarations of the settings say."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from pyspark.ml.param import Param

from spark_elastic import ElasticKerasEstimator, ElasticKerasModel, ElasticTorchEstimator, ElasticTorchModel

ESTIMATORS = [ElasticTorchEstimator, ElasticKerasEstimator]


def signature_of(kind: type) -> dict[str, inspect.Parameter]:
    """Return the parameters of the constructor by name; their annotations are strings."""
    return {name: each for name, each in inspect.signature(kind.__init__).parameters.items() if name != "self"}


def declared_in(kind: type) -> dict[str, Any]:
    """Return the Params of a class by name, those of the class itself before those of its bases."""
    return {
        name: value for base in reversed(kind.__mro__) for name, value in vars(base).items() if isinstance(value, Param)
    }


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_signature_has_every_setting_with_its_default(kind: type) -> None:
    signature, declared = signature_of(kind), declared_in(kind)
    assert sorted(signature) == sorted(declared)
    for name, parameter in signature.items():
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert parameter.default == declared[name].default, name


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_set_params_has_the_signature_of_the_constructor(kind: Any) -> None:
    assert inspect.signature(kind.setParams).parameters == inspect.signature(kind.__init__).parameters


@pytest.mark.parametrize("kind", [*ESTIMATORS, ElasticTorchModel, ElasticKerasModel])
def test_every_setting_has_a_doc_a_getter_and_a_setter(kind: Any) -> None:
    for name, param in declared_in(kind).items():
        assert len(param.doc) > 10
        assert param.doc.endswith(".")
        ending = "".join(part.capitalize() for part in name.split("_"))
        assert f"`{name}`" in getattr(kind, f"get{ending}").__doc__
        assert f"`{name}`" in getattr(kind, f"set{ending}").__doc__

"""Each test here runs for PyTorch, and by night for Keras, on the twin modules `trainings` and `estimators`."""

import importlib
from types import SimpleNamespace

import pytest

from tests.nightly import by_night


@pytest.fixture(scope="session", params=by_night(["torch", "keras"], but=["torch"]))
def framework(request):
    """The test modules of a framework."""
    if request.param == "keras":
        pytest.importorskip("keras")
        pytest.importorskip("tensorflow")
    return modules_of(request.param)


def modules_of(name):
    parts = ("trainings", "estimators")
    return SimpleNamespace(
        name=name, **{part: importlib.import_module(f"tests.unit.ml.{name}.{part}") for part in parts}
    )


@pytest.fixture(scope="session")
def data(framework, tmp_path_factory):
    """The path that `make_training` takes: of datasets with a validation split."""
    return framework.trainings.make_sets(tmp_path_factory.mktemp(f"{framework.name}-sets"))


@pytest.fixture(scope="session")
def undisturbed(framework, data, tmp_path_factory):
    """The outcome and weights of the training in a world of one."""
    folder, trainings = tmp_path_factory.mktemp(f"{framework.name}-undisturbed"), framework.trainings
    return trainings.alone(trainings.make_training(data, folder)), trainings.weights(folder)

from __future__ import annotations

import pytest

from tests.unit.ml.torch import trainings


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """The folder of a set with a validation split."""
    folder = tmp_path_factory.mktemp("set")
    trainings.make_set(folder / "set")
    return folder / "set"


@pytest.fixture(scope="session")
def weighted_data(tmp_path_factory):
    """The same with sample weights."""
    folder = tmp_path_factory.mktemp("weighted-set")
    trainings.make_set(folder / "set", weights=True)
    return folder / "set"


@pytest.fixture(scope="session")
def undisturbed(data, tmp_path_factory):
    """What the training comes to in a world of one: outcome and weights."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return trainings.alone(trainings.make_training(data, folder)), trainings.weights(folder)

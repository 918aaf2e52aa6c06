from __future__ import annotations

import pytest

keras = pytest.importorskip("keras")

from tests.unit.ml.keras import trainings  # noqa: E402  (needs Keras)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """The folder of sets with a validation split, see `trainings.SETS`."""
    folder = tmp_path_factory.mktemp("keras-sets")
    trainings.make_sets(folder)
    return folder


@pytest.fixture(scope="session")
def undisturbed(data, tmp_path_factory):
    """What the training comes to in a world of one: outcome and weights."""
    folder = tmp_path_factory.mktemp("keras-undisturbed")
    return trainings.alone(trainings.make_training(data, folder)), trainings.weights(folder)

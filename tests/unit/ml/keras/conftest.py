import pytest

keras = pytest.importorskip("keras")

from tests.unit.ml.keras import trainings  # noqa: E402  (needs Keras)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """The folder of datasets with a validation split, see `trainings.SETS`."""
    return trainings.make_sets(tmp_path_factory.mktemp("keras-sets"))


@pytest.fixture(scope="session")
def undisturbed(data, tmp_path_factory):
    """The outcome and weights of the training in a world of one."""
    folder = tmp_path_factory.mktemp("keras-undisturbed")
    return trainings.alone(trainings.make_training(data, folder)), trainings.weights(folder)

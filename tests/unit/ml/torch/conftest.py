import pytest

from tests.unit.ml.torch import estimators, trainings


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """The folder of a dataset with a validation split."""
    return trainings.make_sets(tmp_path_factory.mktemp("set"))


@pytest.fixture(scope="session")
def weighted_data(data):
    """The same with sample weights."""
    return data.parent / "weighted"


@pytest.fixture(scope="session")
def undisturbed(data, tmp_path_factory):
    """The outcome and weights of the training in a world of one."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return trainings.alone(trainings.make_training(data, folder)), trainings.weights(folder)


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    """The set of `estimators.make_set`."""
    return estimators.make_set(tmp_path_factory.mktemp("estimators"))

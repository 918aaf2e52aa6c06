import pytest

from tests.unit.ml.both.conftest import data, modules_of, undisturbed  # noqa: F401
from tests.unit.ml.torch import estimators


@pytest.fixture(scope="session")
def framework():
    return modules_of("torch")


@pytest.fixture(scope="session")
def weighted_data(data):  # noqa: F811
    """The same with sample weights."""
    return data.parent / "weighted"


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    """The set of `estimators.make_set`."""
    return estimators.make_set(tmp_path_factory.mktemp("estimators"))

import pytest

keras = pytest.importorskip("keras")

from tests.unit.ml.both.conftest import data, modules_of, undisturbed  # noqa: E402, F401  (needs Keras)
from tests.unit.ml.torch.conftest import dataset  # noqa: E402, F401


@pytest.fixture(scope="session")
def framework():
    return modules_of("keras")

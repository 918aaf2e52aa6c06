import pytest

import spark_elastic.torch as hvd


@pytest.fixture
def alone():
    """A world of one, in this process."""
    hvd.init()
    yield hvd
    hvd.shutdown()

import pytest

pytest.importorskip("tensorflow")


@pytest.fixture
def alone():
    """A world of one, in this process."""
    import spark_elastic.keras as hvd

    hvd.init()
    yield hvd
    hvd.shutdown()

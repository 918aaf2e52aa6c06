from __future__ import annotations

import pytest

from tests.unit.keras import kit


@pytest.fixture(scope="session", autouse=True)
def processes():
    """Workers are warmed up while the first tests run, and ended at the end."""
    kit.pool()
    yield
    kit.close_pools()


@pytest.fixture
def alone():
    """A world of one, in this process."""
    import spark_elastic.keras as hvd

    hvd.init()
    yield hvd
    hvd.shutdown()

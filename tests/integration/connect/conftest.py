"""A process with Spark Connect: pyspark's own classes look at the environment to know that they are in one."""

import pytest

pytest.importorskip("grpc")


@pytest.fixture(scope="module")
def connect_mode():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")
        yield

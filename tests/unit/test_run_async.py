import pytest

from spark_elastic import LocalLauncher, run_async
from spark_elastic.errors import InvalidSettingsError
from spark_elastic.jobs import start
from spark_elastic.wire.ports import ANY
from tests.leftovers import nothing_left


def test_failing_launcher_leaves_no_thread_and_no_socket():
    class Refusing(LocalLauncher):
        def bind(self, spec, on_ended):
            raise RuntimeError("no place today")

    with nothing_left(), pytest.raises(RuntimeError, match="no place today"):
        run_async(print, num_proc=1, launcher=Refusing())


@pytest.mark.parametrize("bind", ["2001:db8::1", "192.0.2.1", "no-such-host.invalid"])
def test_invalid_listen_address_is_reported(bind):
    with pytest.raises(InvalidSettingsError, match=r"LocalLauncher\(hosts="):
        start._listen(bind, ANY, True)
    with pytest.raises(InvalidSettingsError, match=f"the driver cannot listen at {bind}: .*an address of this machine"):
        start._listen(bind, ANY, False)

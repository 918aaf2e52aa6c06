import socket

import pytest

from spark_elastic.driver.hosts import FixedHosts, HostManager
from spark_elastic.driver.launcher import LocalLauncher
from spark_elastic.errors import InvalidSettingsError
from spark_elastic.jobs.start import ThisMachine
from spark_elastic.membership.events import HostsObserved
from spark_elastic.wire import interfaces
from spark_elastic.wire.interfaces import own_addresses


def test_host_names_are_translated_to_the_addresses_that_agents_report():
    of_names = {"node1": "10.0.0.7", "alias": "10.0.0.7", "10.0.0.8": "10.0.0.8"}.__getitem__
    hosts, posted = HostManager(FixedHosts({"10.0.0.8": 1, "node1": 2, "alias": 1}), of_names), []
    hosts.start(posted.append)
    hosts.close()
    (observed,) = posted
    assert list(observed.hosts.items()) == [("10.0.0.8", 1), ("10.0.0.7", 3)]


def test_failing_name_server_removes_no_host():
    answers = [{"node1": 2}, {"node1": 2, "node2": 1}]

    class Discovery:
        def find_available_hosts_and_slots(self):
            return answers.pop(0)

    names, posted = {"node1": "10.0.0.7"}, []
    hosts = HostManager(Discovery(), lambda name: names.get(name, name), interval_s=3600.0)
    hosts.start(posted.append)
    names.clear()
    hosts.poll()
    hosts.close()
    assert [each.hosts for each in posted] == [{"10.0.0.7": 2}, {"10.0.0.7": 2, "node2": 1}]


@pytest.mark.parametrize("found", [["h1"], None, {"h1": "2"}, {1: 2}, {"h1": -1}])
def test_invalid_answer_of_a_discovery_is_refused(found):
    class Odd:
        def find_available_hosts_and_slots(self):
            return found

    with pytest.raises(InvalidSettingsError, match="slots by host"):
        HostManager(Odd(), str)


def test_any_name_of_this_machine_is_the_host_of_local_agents():
    backend = ThisMachine(LocalLauncher(hosts=("localhost", "127.0.0.2")))
    for name in ("localhost", socket.gethostname(), "127.0.0.1", "127.0.0.3", *own_addresses()):
        assert backend.host_of(name) == "127.0.0.1"
    assert backend.host_of("127.0.0.2") == "127.0.0.2"
    assert backend.host_of("192.0.2.9") == "192.0.2.9"


def test_second_address_of_an_interface_is_this_machine_all_the_same(monkeypatch):
    outward = [address for address in own_addresses() if not interfaces.is_loopback(address)]
    monkeypatch.setattr(interfaces, "own_addresses", list)  # which has the first of each interface
    assert [interfaces.on_this_machine(address) for address in outward] == ["127.0.0.1"] * len(outward)
    assert interfaces.on_this_machine("192.0.2.9") == "192.0.2.9"
    assert interfaces.on_this_machine("a name") == "a name"


def test_the_first_answer_reaches_the_machine_by_address():
    events = HostManager(FixedHosts("localhost:2"), ThisMachine(LocalLauncher()).host_of)
    posted = []
    events.start(posted.append)
    events.close()
    assert posted == [HostsObserved({"127.0.0.1": 2})]

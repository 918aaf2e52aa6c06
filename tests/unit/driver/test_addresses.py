import pytest

from spark_elastic.driver.addresses import AddressBook, check_interfaces
from spark_elastic.errors import PortsTakenError, UnknownInterfaceError
from spark_elastic.membership.topology import Place
from spark_elastic.wire.messages import AgentHello


def hello(host, slot=0, port=9, ports_taken="", **addresses):
    addresses = {name: (of,) if isinstance(of, str) else of for name, of in addresses.items()}
    return AgentHello(Place(host, f"e{slot}", slot), 1, addresses, port, ports_taken)


def test_the_address_of_the_channel_comes_first():
    book = AddressBook()
    book.joined(1, hello("a", eth0="10.0.0.1", eth1="192.168.0.1"), "192.168.0.1")
    book.joined(2, hello("b", eth0="10.0.0.2"), "10.0.0.2")
    assert book.choose([1, 2]) == {1: "192.168.0.1", 2: "10.0.0.2"}


def test_loopback_is_the_last_resort_between_hosts():
    book = AddressBook()
    book.joined(1, hello("a", lo="127.0.0.1", eth0="10.0.0.1"), "172.16.0.9")
    book.joined(2, hello("b", lo="127.0.0.1"), "127.0.0.1")
    assert book.choose([1, 2]) == {1: "10.0.0.1", 2: "127.0.0.1"}


def test_an_address_that_others_could_not_reach_is_avoided():
    book = AddressBook()
    book.joined(1, hello("a", eth0="10.0.0.1", eth1="192.168.0.1"), "10.0.0.1")
    book.joined(2, hello("b", eth0="10.0.0.2"), "10.0.0.2")
    probes = dict(book.probes_for(2))
    assert probes == {2: ("10.0.0.1:9", "192.168.0.1:9"), 1: ("10.0.0.2:9",)}
    book.answered(probes[2], ["192.168.0.1:9"])
    book.answered(probes[1], ["10.0.0.2:9"])
    assert book.choose([1, 2]) == {1: "192.168.0.1", 2: "10.0.0.2"}


def test_a_host_without_the_interface_is_named_with_what_it_has():
    book = AddressBook(nics=["ib0"])
    with pytest.raises(
        UnknownInterfaceError, match=r"host a has no interface 'ib0' that is up; it has eth0 \(10.0.0.1\)"
    ):
        book.joined(1, hello("a", eth0="10.0.0.1"), "10.0.0.1")


def test_a_host_without_an_address_is_told_so():
    with pytest.raises(UnknownInterfaceError, match="host b has no interface that is up and has an IPv4 address"):
        check_interfaces("b", {}, None)


def test_all_members_of_a_world_get_addresses_of_one_protocol_if_they_can():
    book = AddressBook()
    book.joined(1, hello("a", eth0=("10.0.0.1", "fd00::1"), lo=("127.0.0.1", "::1")), "10.0.0.1")
    book.joined(2, hello("b", eth0=("10.0.0.2", "fd00::2"), lo=("127.0.0.1", "::1")), "fd00::2")
    assert book.choose([1, 2]) == {1: "10.0.0.1", 2: "10.0.0.2"}
    book.joined(3, hello("c", eth0="fd00::3", lo=("127.0.0.1", "::1")), "fd00::3")
    assert book.choose([1, 2, 3]) == {1: "fd00::1", 2: "fd00::2", 3: "fd00::3"}


def test_protocol_that_does_not_get_through_is_avoided():
    book = AddressBook()
    book.joined(1, hello("a", eth0=("10.0.0.1", "fd00::1")), "10.0.0.1")
    book.joined(2, hello("b", eth0=("10.0.0.2", "fd00::2")), "10.0.0.2")
    probes = dict(book.probes_for(2))
    book.answered(probes[2], ["[fd00::1]:9"])
    book.answered(probes[1], ["[fd00::2]:9"])
    assert book.choose([1, 2]) == {1: "fd00::1", 2: "fd00::2"}


def test_agent_without_a_free_port_is_refused_with_the_numbers():
    with pytest.raises(PortsTakenError, match="all 2 ports"):
        AddressBook().joined(1, hello("a", eth0="10.0.0.1", ports_taken="all 2 ports of agent_ports are taken"), "")


def test_addresses_that_both_hosts_have_are_not_probed():
    book = AddressBook()
    shared = {"lo": ("127.0.0.1", "::1"), "docker0": "172.17.0.1"}
    book.joined(1, hello("a", eth0="10.0.0.1", **shared), "10.0.0.1")
    book.joined(2, hello("b", eth0="10.0.0.2", **shared), "10.0.0.2")
    assert dict(book.probes_for(2)) == {2: ("10.0.0.1:9",), 1: ("10.0.0.2:9",)}


def test_answer_says_nothing_about_what_another_probe_is_to_find_out():
    book = AddressBook()
    book.joined(1, hello("a", eth0="10.0.0.1"), "10.0.0.1")
    book.joined(2, hello("b", eth0="10.0.0.2", eth1="192.168.0.2"), "10.0.0.2")
    first = dict(book.probes_for(2))[1]
    book.joined(3, hello("c", eth0="10.0.0.3", eth1="192.168.0.3"), "10.0.0.3")
    book.probes_for(3)  # the first agent has to try this one, too
    book.answered(first, first)
    assert book.choose([2, 3]) == {2: "10.0.0.2", 3: "10.0.0.3"}


def test_interface_that_has_vanished_is_not_chosen_again_and_one_that_has_come_is():
    book = AddressBook()
    book.joined(1, hello("a", tun0="10.9.0.1", eth0="172.16.0.1", lo="127.0.0.1"), "127.0.0.1")
    book.joined(2, hello("b", eth0="172.16.0.2"), "172.16.0.2")
    book.answered(["10.9.0.1:9", "172.16.0.1:9"], ["10.9.0.1:9", "172.16.0.1:9"])
    assert book.choose([1, 2])[1] == "10.9.0.1"
    book.changed(1, {"eth0": ("172.16.0.1",), "lo": ("127.0.0.1",)}, 11)
    assert book.choose([1, 2])[1] == "172.16.0.1"
    assert not book.has(1, "10.9.0.1")
    assert dict(book.probes_for(1))[2] == ("127.0.0.1:11", "172.16.0.1:11")
    book.changed(1, {"tun1": ("10.9.0.1",), "eth0": ("172.16.0.1",)}, 12)
    book.answered(["10.9.0.1:12", "172.16.0.1:12"], ["10.9.0.1:12"])
    assert book.choose([1, 2])[1] == "10.9.0.1"


def test_host_that_has_lost_the_only_interface_of_nics_keeps_its_address_and_is_named():
    book = AddressBook(nics=["tun0"])
    book.joined(1, hello("a", tun0="10.9.0.1", eth0="172.16.0.1"), "172.16.0.1")
    with pytest.raises(UnknownInterfaceError, match=r"host a has no interface 'tun0' that is up; it has eth0"):
        book.changed(1, {"eth0": ("172.16.0.1",)}, 9)
    assert book.choose([1]) == {1: "10.9.0.1"}


def test_probing_again_goes_in_a_ring_and_replaces_what_was_found_before():
    book = AddressBook()
    for number in range(1, 7):
        addresses = {"eth0": f"10.0.0.{number}", "eth1": f"192.168.0.{number}"}
        book.joined(number, hello(f"h{(number + 1) // 2}", number, **addresses), f"10.0.0.{number}")
    book.answered(["10.0.0.3:9"], ["10.0.0.3:9"])
    asked = dict(book.probe_again())
    tried_by = {n: [m for m, targets in asked.items() if f"10.0.0.{n}:9" in targets] for n in range(1, 7)}
    assert tried_by == {1: [3, 4, 5, 6], 2: [5, 6], 3: [1, 2, 5, 6], 4: [1, 2], 5: [1, 2, 3, 4], 6: [3, 4]}
    assert book.choose([1, 3])[3] == "10.0.0.3"  # until somebody has tried
    book.answered(asked[1], [target for target in asked[1] if "192" in target])
    assert book.choose([1, 3])[3] == "192.168.0.3"
    book.answered(asked[2], asked[2])  # another one gets through: not all do
    assert book.choose([1, 3])[3] == "192.168.0.3"
    again = dict(book.probe_again())
    book.answered(again[2], again[2])
    assert book.choose([1, 3])[3] == "10.0.0.3"

"""What programs for torchrun are given in a world: variables, GPUs, an interface and a port."""

import socket

import pytest

from spark_elastic.errors import UsageError
from spark_elastic.membership.ranking import assign
from spark_elastic.membership.topology import Place, World
from spark_elastic.task import torchrun
from spark_elastic.task.torchrun import environment, explained, interface_variables, reserve_port, visible_gpus


def test_the_variables_are_those_of_torchrun_on_unequal_hosts():
    places = {worker: Place(host, f"e{worker}", worker) for worker, host in enumerate("abab" + "a", 1)}
    world = World(3, assign(places, {}), root=0, version=None, sync=True)
    seen = [environment(world, member, "job-1") for member in world.members]
    named = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    assert [tuple(each[name] for name in named) for each in seen] == [
        ("0", "0", "3", "0"),
        ("1", "1", "3", "0"),
        ("2", "2", "3", "0"),
        ("3", "0", "2", "1"),
        ("4", "1", "2", "1"),
    ]
    same = {"WORLD_SIZE": "5", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert all(each.items() >= {**same, "TORCHELASTIC_RUN_ID": "job-1"}.items() for each in seen)


@pytest.mark.parametrize(
    ("by_local_rank", "shown"),
    [
        (["3", "0"], {"CUDA_VISIBLE_DEVICES": "3,0"}),  # of Spark: each task its own
        (["4,5", "6,7"], {"CUDA_VISIBLE_DEVICES": "4,6"}),
        (["0,1", "0,1"], {}),  # set by the user: each sees both
        (["", ""], {}),
        (["0"], {}),
    ],
)
def test_local_rank_selects_the_gpu_of_the_task(by_local_rank, shown):
    assert visible_gpus(by_local_rank) == shown


def test_gloo_and_nccl_get_the_interface_of_the_chosen_address():
    interfaces = {"lo": ("127.0.0.1", "::1"), "eth1": ("10.0.0.5",)}
    assert interface_variables("10.0.0.5", interfaces) == {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "eth1"}
    assert interface_variables("127.0.0.1", interfaces) == {"GLOO_SOCKET_IFNAME": "lo"}
    assert interface_variables("10.9.9.9", interfaces) == {}


def test_a_reserved_port_is_free_for_a_server_that_torch_starts():
    import torch.distributed as dist

    port = reserve_port("127.0.0.1")
    with pytest.raises(OSError), socket.socket() as other:
        other.bind(("127.0.0.1", port))  # as one that the system gives a port
    for libuv in (True, False):
        store = dist.TCPStore("127.0.0.1", port, 1, is_master=True, use_libuv=libuv)
        store.set("key", "value")
        assert store.get("key") == b"value"
        del store
    torchrun._reserved.pop().close()


def test_only_the_error_of_a_missing_environment_names_the_setting():
    missing = ValueError(
        "Error initializing torch.distributed using env:// rendezvous: environment variable RANK expected, but not set"
    )
    assert isinstance(explained(missing), UsageError)
    other = ValueError("RANK expected")
    assert explained(other) is other

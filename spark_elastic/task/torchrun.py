"""Programs for torchrun as a worker's function (`restart="world"`): their place in the world, as torchrun gives it.

The program connects its processes itself, through torch's TCPStore at MASTER_ADDR and MASTER_PORT. A worker takes part
in one world: after a change, the next one gets a new process with the variables of the new world.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from spark_elastic.errors import UsageError
from spark_elastic.membership.topology import Member, World
from spark_elastic.wire.interfaces import interface_addresses, is_ipv6, is_loopback
from spark_elastic.wire.worker_link import Assignment, WorkerLink

R = TypeVar("R")

_GPUS = "CUDA_VISIBLE_DEVICES"
_reserved: list[socket.socket] = []
"""Holds rank 0's port until the process ends."""
_stores: list[Any] = []
"""torch's stores, which other ranks may need for as long as this process lives."""


def call_in_world(link: WorkerLink, run_id: str, program: Callable[[], R]) -> R:
    """Wait for a world, set torchrun's environment variables for it, and call the program.

    When the driver asks the members to end, the process gets SIGTERM: by default it ends, and a program that handles
    the signal can save first.
    """
    link.restarts_world = True
    link.on_update = lambda: os.kill(os.getpid(), signal.SIGTERM)
    assignment = link.join_at_init()
    assert isinstance(assignment, Assignment), "a worker of such a job leaves init() with a world"
    world, me = assignment.world, assignment.world.member(assignment.worker)
    port = reserve_port(assignment.addresses[0]) if me.rank == 0 else 0
    said = json.dumps([port, os.environ.get(_GPUS, "")])
    table = link.gather(world.round, "torchrun", me.rank, world.size, said, link.stall_timeout_s)
    ports, gpus = zip(*map(json.loads, table), strict=True)
    variables = environment(world, me, run_id)
    variables |= {"MASTER_ADDR": assignment.addresses[0], "MASTER_PORT": str(ports[0])}
    variables |= visible_gpus([gpus[member.rank] for member in _on_host(world, me)])
    os.environ.update(variables)
    for name, value in interface_variables(assignment.addresses[me.rank], interface_addresses()).items():
        os.environ.setdefault(name, value)
    with _ends_groups():
        return program()


@contextlib.contextmanager
def _ends_groups() -> Iterator[None]:
    """Close torch's process groups once the program has returned, as the end of its process would, and not before.

    Ranks that still wait for this one then fail, in place of waiting for a process that stays. A group that a program
    destroys while a DDP model has it ends with the model, whose destructor keeps Python's lock while it waits for a
    thread that may need the lock (pytorch issue 56297): so it is held until here, or until the program makes another.
    """
    from torch import distributed
    from torch.distributed import distributed_c10d as c10d

    destroy, make = c10d.destroy_process_group, c10d.init_process_group
    held: list[Any] = []

    @functools.wraps(destroy)
    def hold_and_destroy(group: Any = None) -> None:
        held.extend(c10d._world.pg_map)
        destroy(group)

    @functools.wraps(make)
    def drop_and_make(*args: Any, **kwargs: Any) -> None:
        held.clear()
        make(*args, **kwargs)

    distributed.destroy_process_group = c10d.destroy_process_group = hold_and_destroy
    distributed.init_process_group = c10d.init_process_group = drop_and_make
    yield
    gc.collect()  # models in cycles
    if distributed.is_initialized():
        _stores.extend(store for _, store in c10d._world.pg_map.values())
        hold_and_destroy()
    threading.Thread(target=held.clear, name="spark_elastic-groups", daemon=True).start()  # may wait for open work


def environment(world: World, me: Member, run_id: str) -> dict[str, str]:
    """Return torchrun's variables for a member of a world, apart from the address of rank 0."""
    hosts = list(dict.fromkeys(member.place.host for member in world.members))
    numbers = {
        "RANK": me.rank,
        "WORLD_SIZE": world.size,
        "LOCAL_RANK": me.local_rank,
        "LOCAL_WORLD_SIZE": me.local_size,
        "GROUP_RANK": hosts.index(me.place.host),
        "GROUP_WORLD_SIZE": len(hosts),
        "ROLE_RANK": me.rank,
        "ROLE_WORLD_SIZE": world.size,
        "TORCHELASTIC_RESTART_COUNT": world.round - 1,
        "TORCHELASTIC_MAX_RESTARTS": sys.maxsize,  # the driver decides
    }
    texts = {"ROLE_NAME": "default", "TORCHELASTIC_RUN_ID": run_id, "TORCHELASTIC_USE_AGENT_STORE": "False"}
    return {name: str(number) for name, number in numbers.items()} | texts


def visible_gpus(by_local_rank: Sequence[str]) -> dict[str, str]:
    """Return the variable with which LOCAL_RANK selects the worker's GPU, if Spark has given each worker one.

    Spark shows each task its own GPU alone, as number 0; programs for torchrun expect to see those of all local ranks.
    """
    first = [seen.partition(",")[0] for seen in by_local_rank]
    return {_GPUS: ",".join(first)} if all(first) and len(set(first)) == len(first) > 1 else {}


def interface_variables(address: str, interfaces: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the variables that have Gloo and NCCL use the interface with this address, as far as it has a name."""
    name = next((name for name, addresses in interfaces.items() if address in addresses), None)
    if name is None or sys.platform != "linux":
        return {}
    return dict.fromkeys(("GLOO_SOCKET_IFNAME", *([] if is_loopback(address) else ["NCCL_SOCKET_IFNAME"])), name)


def reserve_port(address: str) -> int:
    """Return a free port, which the system gives to no other process while this one runs.

    A server that sets SO_REUSEADDR, as torch's does, can listen there: the socket that reserves the port does not.
    """
    holder = socket.socket(socket.AF_INET6 if is_ipv6(address) else socket.AF_INET)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((address, 0))
    _reserved.append(holder)
    return int(holder.getsockname()[1])


def _on_host(world: World, me: Member) -> list[Member]:
    return [member for member in world.members if member.place.host == me.place.host]


def explained(error: BaseException) -> BaseException:
    """Return the error, or one with the setting to use if torch.distributed misses torchrun's environment."""
    if isinstance(error, ValueError) and "env:// rendezvous: environment variable" in str(error):
        return UsageError(
            f"{error}. Programs for torchrun need restart='world' (spark-elastic --torchrun), which gives workers "
            "torchrun's environment and starts all of them again after a loss; others connect with hvd.init()"
        )
    return error

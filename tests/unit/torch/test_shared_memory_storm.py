"""Worlds that break and grow again and again while they reduce through memory: no wrong sum, no hang, nothing left."""

from __future__ import annotations

import os
import random
import time

import pytest
import torch

import spark_elastic.torch as hvd
from spark_elastic.collective.process import process
from spark_elastic.collective.reduce import REDUCTION_SETTING
from spark_elastic.collective.shared_memory.segments import FUTEX_AVAILABLE
from tests.unit.world_link import link, tell
from tests.unit.worlds import WorldDriver

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(not FUTEX_AVAILABLE, reason="words cannot be shared here")]

COUNTS = (3, 5_000, 300_000, 1_200_000)


def reduces_for(seconds: float):
    """Reduce known numbers for a while, in world after world; a sum that mixes rounds or steps cannot be right."""
    os.environ[REDUCTION_SETTING] = "shared"
    hvd.init()
    end = time.time() + seconds  # everybody stops with the first
    state = hvd.elastic.ObjectState(step=0)

    @hvd.elastic.run
    def loop(state):
        world, group = process.assignment.world, process.group()
        on_one_host = world.size > 1 and len({member.place.host for member in world.members}) == 1
        tell("round", (world.round, world.size, on_one_host == (group is not None and group.shared_memory is not None)))
        while True:
            chance = random.Random(state.step)
            base = (world.round * 1000 + state.step) % 4096
            handles = []
            for _ in range(chance.randint(1, 6)):
                tensor = torch.full((chance.choice(COUNTS),), float(base + hvd.rank()))
                handles.append(hvd.allreduce_async(tensor, op=hvd.Sum))
            chance.shuffle(handles)
            expected = float(sum(base + rank for rank in range(hvd.size())))
            for handle in handles:
                got = hvd.synchronize(handle)
                low, high = got.min().item(), got.max().item()
                assert low == high == expected, (low, high, expected)
            state.step += 1
            stop = hvd.allreduce(torch.tensor([time.time() >= end]), op=hvd.Max)  # all at the same step
            state.commit()
            if stop.item():
                break
        return state.step

    return loop(state), link().worker


def storm(seconds: float, members: int, hosts, seed: int) -> tuple[int, list[int]]:
    chance = random.Random(seed)
    names = set(os.listdir("/dev/shm"))
    with WorldDriver(hosts=hosts, start_with=members) as driver:
        driver.start(reduces_for, seconds, count=members)
        driver.wait(lambda: len(driver.told("round")) >= members)
        end = time.time() + seconds
        while time.time() < end - 1.0 and not driver.done:
            time.sleep(chance.uniform(0.02, 0.4))  # a kill must be able to come at any moment
            world = driver.world
            alive = [m.worker for m in world.members if m.worker not in driver._evicted]
            if len(alive) > 1 and not driver._broken:
                victim = chance.choice(alive)
                if chance.random() < 0.2:
                    driver.evict(victim)
                driver.kill(victim)
                driver.start(reduces_for, end - time.time())
            driver.wait(lambda round=world.round: driver.world.round > round or driver.done)
        driver.wait(lambda: len(driver.done) >= 1)
        rounds = driver.told("round")
    assert not {name for name in set(os.listdir("/dev/shm")) - names if "elastic" in name}
    assert all(as_expected for _, _, as_expected in rounds)
    return max(round for round, _, _ in rounds), [size for _, size, _ in rounds]


CASES = [pytest.param(3, ("127.0.0.1",), id="one host"), pytest.param(4, ("127.0.0.1", "127.0.0.2"), id="two hosts")]


@pytest.mark.parametrize(("members", "hosts"), CASES)
def test_kills_at_any_moment_leave_no_wrong_sum_and_no_hang(members, hosts):
    rounds, _ = storm(4.0, members, hosts, seed=members)
    assert rounds > 1

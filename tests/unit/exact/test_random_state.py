"""The states of random generators: they follow from a seed, travel, and return to what was saved."""

from __future__ import annotations

import io
import random
from typing import Any

import numpy as np
import pytest
import torch

from spark_elastic.errors import UsageError
from spark_elastic.exact import random_state
from spark_elastic.exact.random_state import RandomStates


def drawn(generator: Any) -> list[float]:
    if isinstance(generator, torch.Generator):
        return torch.randn(5, generator=generator).tolist()
    if isinstance(generator, random.Random):
        return [generator.gauss(0, 1) for _ in range(5)]
    return [float(each) for each in generator.normal(size=5)]


KINDS = (
    torch.Generator,
    np.random.default_rng,
    lambda: np.random.Generator(np.random.MT19937()),
    np.random.RandomState,
    random.Random,
    lambda: torch.default_generator,
    lambda: np.random.mtrand._rand,
    lambda: random._inst,
)


@pytest.mark.parametrize("make", KINDS)
def test_states_follow_from_the_seed_and_travel(make: Any) -> None:
    one, other = make(), make()
    states, others = RandomStates([one]), RandomStates([other])
    states.seed(7)
    drawn(one)
    saved = io.BytesIO()
    torch.save(states.encoded(), saved)
    saved.seek(0)
    expected = drawn(one)
    others.seed(8)
    others.load(torch.load(saved, weights_only=True))
    assert drawn(other) == expected
    states.seed(7)
    assert drawn(one) != expected


def test_each_generator_has_numbers_of_its_own() -> None:
    generators = [random.Random(), random.Random()]
    RandomStates(generators).seed(3)
    assert drawn(generators[0]) != drawn(generators[1])


def test_two_that_share_a_generator_return_to_the_state_that_either_saved_last() -> None:
    generator = np.random.default_rng()
    one, other = RandomStates([generator]), RandomStates([generator])
    one.seed(1, save=True)
    other.seed(2, save=True)
    expected = drawn(generator)
    random_state.put_back()
    assert drawn(generator) == expected


def test_an_object_that_is_no_generator_is_refused() -> None:
    with pytest.raises(UsageError, match="generators has 'a', which is no random generator"):
        RandomStates(["a"])

"""Random generators are found where the user's code can reach them, and their states come back."""

from __future__ import annotations

import functools
import io
import random
import sys
import types
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from spark_elastic.elastic import own_generators
from spark_elastic.elastic.own_generators import OwnGenerators
from spark_elastic.errors import UsageError

GLOBAL = np.random.default_rng(0)


def names_a_global() -> float:
    return float(GLOBAL.random())


class Slotted:
    __slots__ = ("generator",)

    def __init__(self) -> None:
        self.generator = random.Random(0)


class OfClass:
    generator = random.Random(0)


class Recording(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.made: torch.Generator | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.made = self.made or torch.Generator()
        return x


def of(root: Any) -> OwnGenerators:
    return OwnGenerators({"model": root}, (nn.Module,))


def in_closure() -> Any:
    generator = random.Random(0)
    return lambda: generator.random()


def in_module() -> nn.Module:
    inner = nn.Linear(1, 1)
    inner.generators = [torch.Generator()]
    return nn.Sequential(nn.Sequential(inner))


@pytest.mark.parametrize(
    ("root", "place"),
    [
        (names_a_global, "GLOBAL of tests.unit.test_own_generators"),
        (in_closure(), "generator of in_closure.<locals>.<lambda>"),
        (functools.partial(names_a_global, {"a": Slotted()}), "model[0]['a'].generator"),
        (OfClass(), "model.generator"),
        (Slotted().__init__, "model.generator"),
        (in_module(), "model.0.0.generators[0]"),
        ([{"a": (np.random.RandomState(),)}], "model[0]['a'][0]"),
    ],
)
def test_generators_are_found_and_named_by_their_place(root, place):
    assert place in of(root).encoded()


def test_what_is_seeded_elsewhere_or_belongs_to_a_library_is_left_alone():
    everything = [torch.default_generator, np.random.mtrand._rand, random._inst, random.SystemRandom()]
    library = [functools, torch.utils.data.RandomSampler(range(3), generator=torch.Generator())]
    assert len(of(everything)) == 0
    assert len(of(library)) == 0


KINDS = [torch.Generator, np.random.default_rng, np.random.RandomState, random.Random]


def draw(generator: Any) -> list[float]:
    if isinstance(generator, torch.Generator):
        return torch.randn(3, generator=generator).tolist()
    return [getattr(generator, "gauss", getattr(generator, "normal", None))(0, 1) for _ in range(3)]


@pytest.mark.parametrize(
    "generator",
    [*(kind() for kind in KINDS), *(np.random.Generator(kind()) for kind in (np.random.MT19937, np.random.Philox))],
    ids=lambda each: repr(each).partition("(")[0],
)
def test_states_follow_from_the_seed_and_travel(generator):
    own = of([generator])
    own.seed(1)
    own.save_seeded(1)
    first, second = draw(generator), draw(generator)
    assert first != second
    own.put_back()
    assert draw(generator) == first
    saved = io.BytesIO()
    torch.save(own.encoded(), saved)
    assert draw(generator) == second
    own.put_back()
    assert draw(generator) == second
    own.seed(2)
    assert draw(generator) != first
    saved.seek(0)
    own.load(torch.load(saved, weights_only=True))
    assert draw(generator) == second


def test_each_generator_has_numbers_of_its_own():
    generators = [random.Random(0), random.Random(0)]
    of(generators).seed(1)
    assert draw(generators[0]) != draw(generators[1])


def test_a_generator_that_is_made_in_the_first_step_is_refused():
    model = Recording()
    own = of(model)
    own.check_none_was_made({"model": model})
    model(torch.ones(1))
    with pytest.raises(UsageError, match=r"model\.made, a Generator, was made in the first step"):
        own.check_none_was_made({"model": model})


def test_long_containers_are_not_looked_into():
    inner = nn.Linear(1, 1)
    inner.rows = [random.Random(0) for _ in range(10_001)]
    assert len(of(inner)) == 0
    inner.rows = inner.rows[:10_000]
    assert len(of(inner)) == 10_000


def test_objects_without_end_are_left_with_a_warning(monkeypatch, caplog):
    monkeypatch.setattr(own_generators, "_MOST_OBJECTS", 10)
    inner = nn.Linear(1, 1)
    inner.rows = [[number] for number in range(100)]
    of(inner)
    assert "model refer to more than 10 objects" in caplog.text


def test_generators_of_one_place_are_all_seeded():
    made = [in_closure(), in_closure()]
    with_class = OfClass()
    with_class.generator = random.Random(5)
    own = of([made, with_class, {torch.ones(1): random.Random(1), torch.ones(1) + 1: random.Random(2)}])
    assert len(own) == 6
    own.seed(1)
    first = [each() for each in made]
    own.seed(1)
    assert [each() for each in made] == first


def test_names_hold_no_address():
    places = of({in_closure(): random.Random(1), (1, "a"): random.Random(2), "b": random.Random(3)}).places
    assert places == ["model[#0]", "model[#1]", "model['b']"]


def test_code_of_the_main_module_is_the_users_wherever_the_package_is_installed(monkeypatch):
    main = types.ModuleType("__main__")
    main.__file__ = "/usr/lib/python3/site-packages/spark_elastic/task/main.py"
    monkeypatch.setitem(sys.modules, "__main__", main)
    helper = type("Helper", (), {"__module__": "__main__"})()
    helper.generator = random.Random(0)
    layer = nn.Linear(1, 1)
    layer.helper = helper
    assert of(nn.Sequential(layer)).places == ["model.0.helper.generator"]


class Alive:
    pass


def test_objects_that_run_code_when_they_are_asked_are_not_asked():
    class Lazy(dict):
        def items(self):
            raise AssertionError

        __len__ = items

    alive = Alive()
    dead = weakref.proxy(alive)
    del alive
    assert of([dead, Lazy(a=random.Random(0))]).places == ["model[1]['a']"]


def test_bound_methods_and_namespaces_lead_to_their_generators():
    assert len(of([random.Random(0).random, types.SimpleNamespace(generator=random.Random(0))])) == 2


def test_two_that_share_a_generator_return_to_the_state_that_either_saved_last():
    shared = random.Random(0)
    one, other = of([shared]), of([shared])
    for own, seed in ((one, 1), (other, 2)):
        own.seed(seed)
        own.save_seeded(seed)
    expected = draw(shared)
    one.seed(3)
    one.put_back()
    assert draw(shared) == expected

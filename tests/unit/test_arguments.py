"""The arguments of `run`: validation, defaults, names, and how they reach the membership machine."""

from __future__ import annotations

import dataclasses
import inspect
import math
import typing

import numpy as np
import pytest

import spark_elastic
from spark_elastic import LocalLauncher, run_async
from spark_elastic.errors import InvalidSettingsError
from spark_elastic.jobs.settings import RunCall
from spark_elastic.settings import ElasticSettings, ScalingSettings, declarations
from tests.leftovers import no_threads_left


def nothing():
    pass


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"num_proc": 2.0}, r"num_proc must be a whole number, not 2\.0 \(float\)"),
        ({"num_proc": "4"}, r"num_proc must be a whole number, not '4' \(str\)"),
        ({"num_proc": 0}, "num_proc must be at least 1, not 0"),
        ({"num_proc": 4, "max_num_proc": 2}, "num_proc=4 is larger than max_num_proc=2"),
        ({"num_proc": 2, "min_num_proc": 3}, "min_num_proc=3 is larger than num_proc=2"),
        ({"num_proc": None, "min_num_proc": 3, "max_num_proc": 2}, "min_num_proc=3 is larger than max_num_proc=2"),
        ({"heartbeat_timeout": math.inf}, "heartbeat_timeout must be a positive number of seconds and at most"),
        ({"start_timeout": math.nan}, "start_timeout must be"),
        ({"elastic_timeout": 0}, "elastic_timeout must be a positive"),
        ({"stall_timeout": "60"}, r"stall_timeout must be a number of seconds, not '60' \(str\)"),
        ({"stall_timeout": True}, "stall_timeout must be a number of seconds"),
        ({"cooldown_range": 5}, r"cooldown_range must be \(shortest, longest\) seconds or None, not 5"),
        ({"cooldown_range": (0.5, math.inf)}, "cooldown_range must be a positive number"),
        ({"cooldown_range": (2, 1)}, r"cooldown_range must be \(shortest, longest\) seconds, not \(2\.0, 1\.0\)"),
        ({"reset_limit": math.nan}, "reset_limit must be a whole number"),
        ({"reset_limit": -1}, "reset_limit must be at least 0"),
        ({"verbose": "1"}, "verbose must be a whole number"),
        ({"status_port": "4050"}, "status_port must be a port, 0 for any free one, 'auto', or None"),
        ({"status_port": -1}, "status_port must be at least 0"),
        ({"status_port": 65536}, "status_port must be a port of at most 65535, not 65536"),
        ({"discovery": "hosts.sh"}, r"discovery must be .*HostDiscoveryScript\(path\)"),
        ({"discovery": {"h1": 2}}, r"discovery must be .*FixedHosts\(hosts\)"),
        ({"stdout": "out.txt"}, "stdout must be an open text file, not 'out.txt'"),
        ({"stderr": 2}, "stderr must be an open text file"),
        ({"args": 5}, "args must be a list or a tuple, not 5"),
        ({"kwargs": [1]}, "kwargs must be a dict"),
        ({"kwargs": {1: 2}}, "kwargs must be a dict with names as keys"),
        ({"env": "A=1"}, "env must be a dict"),
        ({"env": {"A": None}}, "env: the value of A must be a str"),
        ({"env": {"A=B": "x"}}, "env: 'A=B' is no name"),
        ({"env": {"A": "\0"}}, "without NUL"),
        ({"nics": 3}, "nics must be names"),
        ({"nics": ["eth0", ""]}, "nics must be names"),
        ({"fn": None}, r"must be the function itself, not None \(NoneType\)"),
        ({"launcher": "local"}, "launcher must be a LocalLauncher"),
        ({"resources": ["gpu"]}, r"resources must be a dict such as \{'gpu': 1, 'cpus': 4\}, not \['gpu'\]"),
        ({"resources": {"gpu": 0.75}}, "resources: 'gpu' must be a whole number, or a share of at most 0.5, not 0.75"),
        ({"resources": {"cpus": 0.5}}, "resources: 'cpus' must be a whole number, not 0.5"),
        ({"resources": {"cpus": "4"}}, "resources: 'cpus' must be a whole number, not '4'"),
        ({"resources": {"gpu": 1}}, "resources= is for Spark's tasks; a LocalLauncher has processes"),
        ({"restart": "all"}, r"restart must be 'world' \(.*\) or None, not 'all'"),
        ({"restart_interval": 60}, "restart_interval=60 without restart='world'.*leave it out"),
        ({"restart": "world", "restart_interval": 0}, "restart_interval must be a positive number of seconds"),
        ({"restart": "world", "checkpoint_dir": "/tmp/c"}, "checkpoint_dir is for elastic loops"),
        ({"fn": __file__, "kwargs": {"lr": 1}}, "test_arguments.py is a script: give its arguments as texts"),
        ({"fn": __file__, "args": (0.1,)}, "test_arguments.py is a script: give its arguments as texts"),
    ],
)
def test_invalid_argument_is_reported_with_its_value_and_nothing_is_started(given, says):
    call = {"fn": nothing, "num_proc": 1, "launcher": LocalLauncher(), **given}
    with no_threads_left(), pytest.raises(InvalidSettingsError, match=says):
        run_async(call.pop("fn"), call.pop("args", ()), call.pop("kwargs", None), **call)


def test_numpy_numbers_become_plain_ones():
    given = ScalingSettings(
        num_proc=np.int64(2),
        min_num_proc=np.int32(1),
        max_num_proc=np.int16(3),
        heartbeat_timeout=np.float32(5),
        cooldown_range=[np.float64(1), 2],
    )
    settings = given.resolve(lambda: (9, 9))
    assert settings == ElasticSettings(2, 1, 3, heartbeat_timeout_s=5.0, cooldown_range_s=(1.0, 2.0))
    assert {type(settings.num_proc), type(settings.min_num_proc), type(settings.max_num_proc)} == {int}
    assert type(settings.heartbeat_timeout_s) is float


@pytest.mark.parametrize("function", [spark_elastic.run, spark_elastic.run_async])
def test_run_takes_the_declared_settings_with_their_types_and_defaults(function):
    made, types = inspect.signature(RunCall).parameters, typing.get_type_hints(RunCall)
    shown = inspect.signature(function).parameters
    assert list(shown) == list(made)
    for name, parameter in made.items():
        assert (shown[name].kind, shown[name].default) == (parameter.kind, parameter.default)
        assert shown[name].annotation == types[name]


def test_help_of_run_explains_every_setting():
    for each in declarations(RunCall):
        assert f"    {each.name}: {each.setting.doc[:30]}" in spark_elastic.run.__doc__


def test_every_scaling_setting_reaches_the_membership_machine():
    given = {each.name: default(each) for each in declarations(ScalingSettings)}
    assert len(given) == 12
    resolved = dataclasses.asdict(ScalingSettings(**given).resolve(lambda: (9, 9)))
    assert {name.removesuffix("_s"): value for name, value in resolved.items()}.items() >= given.items()


def default(declaration):
    """A value that differs from the setting's default."""
    others = {
        "num_proc": 3,
        "min_num_proc": 2,
        "max_num_proc": 4,
        "cooldown_range": (1.5, 2.5),
        "reset_limit": 7,
        "restart": "world",
        "restart_interval": 60.0,
    }
    return others[declaration.name] if declaration.name in others else declaration.default + 1


@pytest.mark.parametrize(
    ("given", "bounds", "resolved"),
    [
        ({}, (4, 4), (4, 4, 4)),
        ({"min_num_proc": 2}, (4, 4), (4, 2, 4)),
        ({"max_num_proc": 3}, (4, 4), (3, 3, 3)),
        ({"max_num_proc": 9}, (4, 4), (4, 4, 9)),
        ({"min_num_proc": 6}, (4, 4), (6, 6, 6)),
        ({"num_proc": 2, "max_num_proc": 3}, (4, 4), (2, 2, 3)),
        ({}, (2, 8), (8, 2, 8)),  # of dynamic allocation
        ({"max_num_proc": 4}, (2, 8), (4, 2, 4)),
        ({"max_num_proc": 1}, (2, 8), (1, 1, 1)),
        ({"min_num_proc": 3}, (2, 8), (8, 3, 8)),
        ({"num_proc": 5}, (2, 8), (5, 5, 5)),
    ],
)
def test_number_of_workers_defaults_to_the_slots_within_the_bounds(given, bounds, resolved):
    settings = ScalingSettings(**given).resolve(lambda: bounds)
    assert (settings.num_proc, settings.min_num_proc, settings.max_num_proc) == resolved


def test_horovods_argument_names_are_accepted_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="np= is Horovod's name for this; it is called num_proc= here"):
        assert spark_elastic.run(nothing, np=1, launcher=LocalLauncher(), verbose=0) == [None]
    with (
        pytest.warns(UserWarning, match="use_mpi= has no effect"),
        pytest.raises(InvalidSettingsError, match="min_num_proc=3 is larger than num_proc=2"),
    ):
        run_async(nothing, num_proc=2, min_num_proc=3, use_mpi=True, launcher=LocalLauncher())
    with pytest.raises(InvalidSettingsError, match="min_np=1 and min_num_proc=2 are the same setting"):
        run_async(nothing, min_np=1, min_num_proc=2, launcher=LocalLauncher())
    with pytest.raises(TypeError, match=r"run_async\(\) .* 'start_timout'; did you mean 'start_timeout'"):
        run_async(nothing, start_timout=1, launcher=LocalLauncher())
    with pytest.raises(TypeError, match="did you mean 'num_proc'"):
        run_async(nothing, NUM_PROC=1, launcher=LocalLauncher())
    with pytest.raises(InvalidSettingsError, match=r"device must be .*, not 'gpu'; did you mean 'cuda'"):
        run_async(nothing, device="gpu", launcher=LocalLauncher())
    with pytest.raises(TypeError, match="unknown"):
        run_async(nothing, unknown=1, launcher=LocalLauncher())

import pytest

from spark_elastic.cli.options import parser, run_arguments


def parse(line):
    return parser().parse(line.split())


def test_words_after_the_script_are_its_arguments():
    options = parse("-np 2 train.py --num-proc 7 -v --lr=0.1 -- x")
    assert (options.script, options.script_args) == ("train.py", ("--num-proc", "7", "-v", "--lr=0.1", "--", "x"))
    assert options.num_proc == 2
    assert options.verbose == 0


def test_two_dashes_end_the_options():
    assert parse("-np 2 -- --odd-name.py -x").script == "--odd-name.py"


@pytest.mark.parametrize("line", ["-np 3 t.py", "--num-proc 3 t.py", "--num-proc=3 t.py"])
def test_the_number_of_workers_can_be_written_as_in_horovod(line):
    assert run_arguments(parse(line))["num_proc"] == 3


def test_only_options_that_were_given_are_passed_to_run():
    assert run_arguments(parse("train.py")) == {"verbose": 1}


def test_every_setting_reaches_run_under_its_own_name():
    line = (
        "-np 4 --min-np 2 --max-num-proc 8 --reset-limit 9 --elastic-timeout 60 --start-timeout 30.5 "
        "--heartbeat-timeout 5 --stall-timeout 90 --cooldown-range 1 20 --nics eth0,eth1 --env A=1 --env B=x=y "
        "--torchrun --restart-interval 600 -vv train.py"
    )
    assert run_arguments(parse(line)) == {
        "num_proc": 4,
        "min_num_proc": 2,
        "max_num_proc": 8,
        "reset_limit": 9,
        "elastic_timeout": 60.0,
        "start_timeout": 30.5,
        "heartbeat_timeout": 5.0,
        "stall_timeout": 90.0,
        "cooldown_range": (1.0, 20.0),
        "nics": ["eth0", "eth1"],
        "env": {"A": "1", "B": "x=y"},
        "restart": "world",
        "restart_interval": 600.0,
        "verbose": 3,
    }


@pytest.mark.parametrize(("word", "value"), [("0", 0), ("4050", 4050), ("auto", "auto"), ("off", None)])
def test_the_status_page_has_a_port_or_is_off(word, value):
    assert run_arguments(parse(f"--status-port {word} train.py"))["status_port"] == value


def test_a_cooldown_range_of_zeros_means_none():
    assert run_arguments(parse("--cooldown-range 0 0 train.py"))["cooldown_range"] is None

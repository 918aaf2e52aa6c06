import pickle
import subprocess
import sys
import textwrap

import pytest

from spark_elastic.errors import UsageError
from spark_elastic.task.script import MAX_BYTES, collect

RUN_PICKLED = (
    "import pickle, sys; from spark_elastic.task.script import run_script; run_script(pickle.load(sys.stdin.buffer))"
)


def write(folder, **sources):
    for name, source in sources.items():
        path = folder / (name.replace("__in__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))


def run_elsewhere(script):
    """Run the script as a worker does: in another process that only has the pickled script."""
    return subprocess.run([sys.executable, "-c", RUN_PICKLED], input=pickle.dumps(script), capture_output=True)


def output_of(script):
    done = run_elsewhere(script)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def test_script_runs_with_the_names_and_paths_that_python_sets(tmp_path):
    write(
        tmp_path,
        train="""
        import os, sys
        class Net: pass
        print(__name__, sys.argv[1:], os.path.basename(sys.argv[0]), os.path.basename(__file__))
        print(Net.__module__, sys.modules["__main__"].Net is Net, os.path.dirname(__file__) == sys.path[0])
        """,
    )
    script = collect(str(tmp_path / "train.py"), ("--lr", "0.1"))
    assert output_of(script) == "__main__ ['--lr', '0.1'] train.py train.py\n__main__ True True\n"


def test_script_that_exists_on_the_worker_runs_from_its_own_folder(tmp_path):
    write(tmp_path, train="print(__file__)")
    assert output_of(collect(str(tmp_path / "train.py"), ())) == f"{tmp_path}/train.py\n"


def test_imported_modules_beside_the_script_are_sent_with_it(tmp_path):
    write(
        tmp_path,
        train="import model, json\nfrom parts.blocks import block\nprint(model.NAME, block(), __file__)",
        model="import helper\nNAME = helper.NAME",
        helper="NAME = 'net'",
        parts__in____init__="",
        parts__in__blocks="from . import more\ndef block(): return more.VALUE",
        parts__in__more="VALUE = 7",
        unrelated="this is not even Python",
    )
    script = collect(str(tmp_path / "train.py"), ())
    assert set(script.files) == {
        "train.py",
        "model.py",
        "helper.py",
        "parts/__init__.py",
        "parts/blocks.py",
        "parts/more.py",
    }
    (tmp_path / "train.py").unlink()
    (tmp_path / "helper.py").write_text("NAME = 'changed since'")
    printed = output_of(script).split()
    assert printed[:2] == ["net", "7"]
    assert not printed[2].startswith(str(tmp_path))


def test_a_copy_is_removed_when_the_script_ends(tmp_path):
    write(tmp_path, train="print(__file__)")
    script = collect(str(tmp_path / "train.py"), ())
    (tmp_path / "train.py").unlink()
    copy = output_of(script).strip()
    done = subprocess.run(["test", "-e", copy])
    assert done.returncode == 1


@pytest.mark.parametrize("ending", ["", "raise SystemExit", "import sys; sys.exit(0)", "exit(None)"])
def test_exit_without_a_code_finishes_the_script(tmp_path, ending):
    write(tmp_path, train=ending)
    assert run_elsewhere(collect(str(tmp_path / "train.py"), ())).returncode == 0


@pytest.mark.parametrize(("code", "told"), [("3", "exited with code 3"), ("'no data'", "exited with code 1: no data")])
def test_exit_with_a_code_or_a_message_fails_with_it(tmp_path, code, told):
    write(tmp_path, train=f"import sys\nsys.exit({code})")
    done = run_elsewhere(collect(str(tmp_path / "train.py"), ()))
    assert done.returncode == 1
    assert f"ScriptExit: {told}" in done.stderr.decode()


def test_processes_that_the_script_spawns_can_import_it(tmp_path):
    write(
        tmp_path,
        train="""
        import multiprocessing as mp
        def double(x): return 2 * x
        if __name__ == "__main__":
            with mp.get_context("spawn").Pool(1) as pool:
                print(pool.map(double, [1, 2]))
        """,
    )
    assert output_of(collect(str(tmp_path / "train.py"), ())) == "[2, 4]\n"


def test_folder_in_place_of_a_script_is_refused(tmp_path):
    with pytest.raises(UsageError, match="is a folder"):
        collect(str(tmp_path), ())


def test_modules_larger_than_source_code_are_refused(tmp_path):
    write(tmp_path, train="import table", table="ROWS = '" + "x" * MAX_BYTES + "'")
    with pytest.raises(UsageError, match="install them on the workers"):
        collect(str(tmp_path / "train.py"), ())

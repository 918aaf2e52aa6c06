"""The worker process: imports what training needs, waits for its worker id and runs the user's function.

The agent starts it as ``python -m spark_elastic.task.main AGENT_PID RESULT_FD DEATH_FD [module ...]``, or has it forked
by a fork server (`fork_server`). The id, the addresses of the driver and the function arrive on stdin. The agent then
keeps that pipe open as a lifeline: the process ends when it closes. The result is written to RESULT_FD; DEATH_FD is for
the reaper. Then the process waits until the agent releases it, or until the driver has the function called again,
because another member of the world was lost: the world is rebuilt from the states that this process still holds.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import faulthandler
import functools
import importlib
import io
import logging
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, NoReturn

import cloudpickle

from spark_elastic.errors import HorovodInternalError, InvalidSettingsError, LoopResultError, NotPicklableError
from spark_elastic.settings import DEVICE_SETTING, TRACKED_RUN
from spark_elastic.task.freed_memory import keep_freed_memory
from spark_elastic.task.generated_code import keep_generated_code_in_memory
from spark_elastic.task.lazy_compiler import import_compiler_on_use
from spark_elastic.task.reaper import exit_now, flush_output, start_reaper
from spark_elastic.task.script import ScriptExit
from spark_elastic.task.torchrun import call_in_world, explained
from spark_elastic.task.user_frames import ALL_FRAMES_SETTING, format_error
from spark_elastic.wire import worker_link
from spark_elastic.wire.channel import connect
from spark_elastic.wire.messages import RESULT_HEAD, LaunchSpec, interpreter
from spark_elastic.wire.pickling import dumps
from spark_elastic.wire.worker_link import WorkerLink

log = logging.getLogger("spark_elastic.task")

EXIT_RAISED = 1
EXIT_ABANDONED = 75
"""The function has to be run again from its start, in a new process."""
EXIT_ORPHANED = 76
"""The agent is gone."""
EXIT_CHANNEL_LOST = 79
"""The channel to the driver broke: without it the worker can neither report progress nor learn of a new world."""
_PR_SET_PDEATHSIG = 1


def import_modules(modules: Sequence[str]) -> None:
    """Import what the function is expected to need."""
    for module in modules:
        with contextlib.suppress(ImportError):  # a missing module that the function needs fails there
            importlib.import_module(module)
    if "torch" in sys.modules:
        import_compiler_on_use()
    if "tensorflow" in sys.modules:
        keep_generated_code_in_memory()


def run_worker(parent: int, result_fd: int, death_fd: int, modules: Sequence[str] = ()) -> NoReturn:
    """Import modules, wait for the worker's id and function, and run it. The process ends with its parent.

    The descriptors are those of the pipe for results and of the one for the reaper.
    """
    die_with_parent(parent)
    start_reaper(death_fd)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the agent ignores it, and a child inherits that
    faulthandler.enable()
    control = _take_stdin()
    import_modules(modules)
    spec: LaunchSpec
    try:
        worker, spec = pickle.load(control)
    except (EOFError, pickle.UnpicklingError):
        exit_now(EXIT_ORPHANED)
    pickled, spec = [spec.function], dataclasses.replace(spec, function=b"")
    returned = threading.Event()
    next_run: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    """Numbers of further calls of the function; None: exit."""
    watch = (control, returned, next_run)
    threading.Thread(target=_watch_lifeline, args=watch, name="spark_elastic-lifeline", daemon=True).start()
    timeout_s = spec.connect_timeout_s
    channel = connect(spec.driver_addresses, spec.key, timeout_s=timeout_s, encrypt=spec.encrypt)
    ends = f"spark_elastic: worker {worker} ends: "
    link = WorkerLink(worker, channel, spec.key, lambda why: exit_now(EXIT_CHANNEL_LOST, ends + why))
    worker_link.install(link)
    link.start()
    call = _load(link, pickled.pop(), spec.made_by)  # it may hold a model, so nothing here keeps it
    _check_device(link)
    if spec.restarts_world:
        call = functools.partial(call_in_world, link, spec.job, functools.partial(_as_process, call))
    link.on_run_again = next_run.put
    with os.fdopen(result_fd, "wb") as results:
        run: int | None = 1
        while run is not None:
            result = _run(link, call)
            returned.set()  # first: the agent may close the lifeline as soon as it has the result
            link.returned(True)
            results.write(RESULT_HEAD.pack(link.has_loop, run, len(result)) + result)
            results.flush()
            flush_output()
            run = next_run.get()
            if run is not None:
                returned.clear()
                link.returned(False)
                from spark_elastic.elastic.finish import loops

                loops.run_again()
    _call_exit_handlers()
    exit_now(0)


def _as_process(program: Callable[[], Any]) -> Any:
    """Call a program and, before its result counts, do what Python does at the end of a process: wait for threads that
    are no daemons, for executors and for child processes, and call the exit handlers.
    """
    result = program()
    threading._shutdown()  # type: ignore[attr-defined]
    _call_exit_handlers()
    return result


def _call_exit_handlers() -> None:
    logging.shutdown()
    _leave_drivers_run()
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()


def _leave_drivers_run() -> None:
    """Keep MLflow from ending the driver's run at the exit of this process. A run of the worker's own is ended."""
    fluent, run_id = sys.modules.get("mlflow.tracking.fluent"), os.environ.get(TRACKED_RUN)
    if fluent is None or run_id is None:
        return
    with contextlib.suppress(Exception):  # not a public function: another version may not have it
        active = fluent.active_run()
        if active is not None and active.info.run_id == run_id:
            atexit.unregister(fluent._safe_end_run)


def _watch_lifeline(lifeline: BinaryIO, returned: threading.Event, next_run: queue.SimpleQueue[int | None]) -> None:
    """Wait until the lifeline closes: the agent releases this process, or is gone if the function has not returned."""
    lifeline.read()
    if returned.is_set():
        next_run.put(None)
    else:
        exit_now(EXIT_ORPHANED)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, and make it the leader of a new process group."""
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the line above
        exit_now(EXIT_ORPHANED)


def _take_stdin() -> BinaryIO:
    """Return the pipe from the agent, replace stdin by an empty one, and flush stdout and stderr after each line."""
    control = os.fdopen(os.dup(0), "rb")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    return control


def _load(link: WorkerLink, pickled: bytes, made_by: str) -> Callable[[], Any]:
    """Return the user's function bound to its arguments; report and exit if it cannot be loaded here."""
    try:
        function, args, kwargs = cloudpickle.loads(pickled)
        return functools.partial(function, *args, **kwargs)
    except Exception as error:
        problem = NotPicklableError(
            f"the function cannot be loaded in the worker: {type(error).__name__}: {error}. It was pickled by "
            f"{made_by} and this is {interpreter()}: if they differ, let PYSPARK_PYTHON name the same Python for both; "
            "if a module is missing, install it on the executors, or send your own with sc.addPyFile"
        )
        _fail(link, problem, error)


def _fail(link: WorkerLink, problem: Exception, cause: Exception) -> NoReturn:
    """Report an error with the traceback of its cause, and exit."""
    link.raised(problem, format_error(cause, all_frames=ALL_FRAMES_SETTING in os.environ))
    exit_now(EXIT_RAISED)


def _check_device(link: WorkerLink) -> None:
    """Report and exit before the training if the job demands a GPU and this worker has none."""
    device = os.environ.get(DEVICE_SETTING, "auto")
    if not device.startswith("cuda") or "tensorflow" in sys.modules:  # TensorFlow checks its GPUs itself
        return
    from spark_elastic.collective.gpu.devices import choose_device, device_info

    try:
        choose_device(device, device_info(), lambda gpus: (0, "checked alone"))
    except InvalidSettingsError as error:
        _fail(link, error, error)


def _run(link: WorkerLink, function: Callable[[], Any]) -> bytes:
    """Call the user's function until it returns, and return its pickled result; report and exit if it fails.

    A collective that fails after an elastic loop does not undo the loop: the function is called again and continues
    from the state that the loop has left.
    """
    try:
        value = _call_until_returned(function)
    except LoopResultError as error:  # this is a newcomer, and the others continue without it
        link.abandoned(str(error))
        exit_now(EXIT_ABANDONED)
    except HorovodInternalError as error:
        link.abandoned(f"a collective failed outside of an elastic loop: {error}")
        exit_now(EXIT_ABANDONED)
    except BaseException as error:  # SystemExit too: the function has not returned
        # not to stderr: the driver has the text, and raises it
        exit_code = error.exit_code if isinstance(error, ScriptExit) else None
        link.raised(explained(error), format_error(error, all_frames=ALL_FRAMES_SETTING in os.environ), exit_code)
        exit_now(EXIT_RAISED)
    try:
        return dumps(value)
    except Exception as error:
        problem = NotPicklableError(f"the function returned a {type(value).__name__} that cannot be pickled: {error}")
        _fail(link, problem, error)


def _call_until_returned(function: Callable[[], Any]) -> Any:
    while True:
        try:
            return _call(function)
        except HorovodInternalError as error:
            from spark_elastic.elastic.finish import loops  # it imports torch, which has raised this error

            if not loops.can_run_again:
                raise
            log.info("a collective failed after the elastic loop; calling the function again from there: %s", error)
        loops.run_again()


def _call(function: Callable[[], Any]) -> Any:
    """Call the function; if it has forked, end the child here, where it would take itself for the worker."""
    worker = os.getpid()
    try:
        result = function()
    except BaseException as error:
        if os.getpid() == worker:
            raise
        if not isinstance(error, SystemExit):
            traceback.print_exception(error)
        _end_child(error.code if isinstance(error, SystemExit) else 1)
    if os.getpid() != worker:
        _end_child(0)
    return result


def _end_child(code: object) -> NoReturn:
    """End a forked child as `sys.exit(code)` does, without the exit handlers of the worker."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    flush_output()
    os._exit(code or 0)


if __name__ == "__main__":
    keep_freed_memory()
    agent, to_agent, to_reaper = map(int, sys.argv[1:4])
    run_worker(agent, to_agent, to_reaper, sys.argv[4:])

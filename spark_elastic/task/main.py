"""The worker process: imports what training needs, waits for its order, runs the user's function.

Started by the agent as ``python -m spark_elastic.task.main PARENT_PID RESULT_FD [module ...]``. The order and the
function come through stdin, which afterwards is the lifeline: when it closes, the process ends. The result leaves
through RESULT_FD. The process then waits for its release, or for the order to run the function again: a member of its
world was lost, and the world is rebuilt from the states that are kept here.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import importlib
import io
import json
import logging
import os
import queue
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

import cloudpickle

from spark_elastic.errors import HorovodInternalError, InvalidSettingsError, LoopResultError, NotPicklableError
from spark_elastic.settings import DEVICE_SETTING
from spark_elastic.task.driver_client import ChannelLink, exit_now
from spark_elastic.wire import worker_link
from spark_elastic.wire.channel import connect
from spark_elastic.wire.launch_spec import interpreter
from spark_elastic.wire.worker_link import loops

# Ends what a worker's function has started, when the worker is gone and there is no agent left to do it.
#
# The kernel kills a worker with its agent, but not the worker's own children: a data loader's processes would go on
# for
# seconds, a program of the user's for ever. So each worker has one small process in its group that waits for its end
# and
# then kills the group. It is forked before anything but the standard library is imported.

_POLL_S = 0.2


def guard_group() -> None:
    """Start the guard of this process's group. The caller leads the group and has no threads yet."""
    worker = os.getpid()
    between = os.fork()
    if between != 0:
        os.waitpid(between, 0)
        return
    try:
        if os.fork() == 0:  # a grandchild, so that a function that waits for all its children does not wait for this
            _let_go_of_everything()
            _wait_for(worker)
            os.killpg(worker, signal.SIGKILL)  # this process is in the group, so its number is nobody else's by now
    finally:
        os._exit(0)


def _let_go_of_everything() -> None:
    """Signals are meant for the worker, and its pipes have to break when it dies."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for descriptor in _open_descriptors():
        try:
            os.close(descriptor)
        except OSError:
            pass  # it was open for the listing alone


def _open_descriptors() -> list[int]:
    for folder in ("/proc/self/fd", "/dev/fd"):
        try:
            return [int(name) for name in os.listdir(folder)]
        except OSError:
            continue
    return list(range(256))


def _wait_for(worker: int) -> None:
    if hasattr(os, "pidfd_open"):
        try:
            select.select([os.pidfd_open(worker)], [], [])
            return
        except OSError:
            pass  # it is gone already, or the kernel is too old
    while _exists(worker):
        time.sleep(_POLL_S)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


log = logging.getLogger("spark_elastic.task")

EXIT_RAISED = 1
EXIT_ABANDONED = 75
EXIT_ORPHANED = 76
_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    parent, result_fd, modules = int(argv[0]), int(argv[1]), argv[2:]
    die_with(parent)
    guard_group()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which its agent ignores, and that is inherited
    faulthandler.enable()
    control = _take_stdin()
    for module in modules:
        with contextlib.suppress(ImportError):  # what the function really needs, it imports itself
            importlib.import_module(module)
    order = json.loads(control.readline() or b"null")
    if order is None:
        exit_now(EXIT_ORPHANED)
    function = control.read(order["function_bytes"])
    returned = threading.Event()
    orders: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    hold = threading.Thread(target=_hold, args=(control, returned, orders), name="spark_elastic-lifeline", daemon=True)
    hold.start()
    addresses = [(str(host), int(port)) for host, port in order["driver_addresses"]]
    key = bytes.fromhex(order["key"])
    channel = connect(addresses, key, timeout_s=order["connect_timeout_s"])
    link = ChannelLink(order["worker"], channel, key)
    worker_link.install(link)
    link.start()
    call = _load(link, function, order["made_by"])
    _check_device(link)
    link.on_run_again(orders.put)
    with os.fdopen(result_fd, "wb") as results:
        run: int | None = 1
        while run is not None:
            result = _run(link, call)
            returned.set()  # before the agent knows: it may close the lifeline as soon as it has the result
            link.returned(True)
            _hand_over(results, result, link.in_loop, run)
            _flush()
            run = orders.get()
            if run is not None:
                returned.clear()
                link.returned(False)
                loops.run_again()
    logging.shutdown()
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    exit_now(0)


def _hold(lifeline: BinaryIO, returned: threading.Event, orders: queue.SimpleQueue[int | None]) -> None:
    """Wait for the end of the lifeline; before the function has returned, that means the agent is gone."""
    lifeline.read()
    if returned.is_set():
        orders.put(None)
    else:
        exit_now(EXIT_ORPHANED)


def die_with(parent: int) -> None:
    """Have the kernel kill this process with its agent, and put it in a group of its own for the agent to kill."""
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        exit_now(EXIT_ORPHANED)


def _take_stdin() -> BinaryIO:
    """The pipe from the agent, out of the user's reach; their stdin is empty, their lines leave whole."""
    control = os.fdopen(os.dup(0), "rb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    return control


def _load(link: ChannelLink, pickled: bytes, made_by: str) -> Callable[[], Any]:
    """The user's function with its arguments; reports and exits if it cannot be loaded here."""
    try:
        function, args, kwargs = cloudpickle.loads(pickled)
        return functools.partial(function, *args, **kwargs)
    except Exception as error:
        problem = NotPicklableError(
            f"the function cannot be loaded in the worker: {type(error).__name__}: {error}. It was pickled by "
            f"{made_by} and this is {interpreter()}: if they differ, let PYSPARK_PYTHON name the same Python for both; "
            "if a module is missing, install it on the executors"
        )
        link.raised(problem, "".join(traceback.format_exception(error)))
        exit_now(EXIT_RAISED, str(problem))


def _check_device(link: ChannelLink) -> None:
    """Who demands a GPU learns before the training that there is none; reports and exits then."""
    asked = os.environ.get(DEVICE_SETTING, "auto")
    if not asked.startswith("cuda") or "tensorflow" in sys.modules:  # which looks for its own
        return
    from spark_elastic.collective.devices import choose_device, device_info

    try:
        choose_device(asked, device_info(), local_rank=0)
    except InvalidSettingsError as error:
        link.raised(error, "".join(traceback.format_exception(error)))
        exit_now(EXIT_RAISED, str(error))


def _run(link: ChannelLink, function: Callable[[], Any]) -> bytes:
    """Call the user's function until it returns; reports and exits if it does not. Returns: its pickled result.

    A collective that fails after an elastic loop does not undo the loop: the function is called again, and goes on from
    the state that the loop has left.
    """
    try:
        value = _returned(function)
    except LoopResultError as error:  # of a newcomer: the others go on without it
        link.abandoned(str(error))
        exit_now(EXIT_ABANDONED)
    except HorovodInternalError as error:
        link.abandoned(f"a collective failed outside of an elastic loop: {error}")
        traceback.print_exc()
        exit_now(EXIT_ABANDONED)
    except BaseException as error:  # SystemExit too: leaving is not finishing
        text = "".join(traceback.format_exception(type(error), error, _users_part(error.__traceback__)))
        link.raised(error, text)
        exit_now(EXIT_RAISED, text)
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        problem = NotPicklableError(f"the function returned a {type(value).__name__} that cannot be pickled: {error}")
        link.raised(problem, "".join(traceback.format_exception(error)))
        exit_now(EXIT_RAISED, str(problem))


def _returned(function: Callable[[], Any]) -> Any:
    while True:
        try:
            return function()
        except HorovodInternalError as error:
            if not loops.can_run_again:
                raise
            log.info("a collective failed after the elastic loop, what follows the loop is done again: %s", error)
        loops.run_again()


def _users_part(frames: Any) -> Any:
    """The traceback without this module's own frames."""
    own = frames
    while own is not None and own.tb_frame.f_code.co_filename == __file__:
        own = own.tb_next
    return frames if own is None else own


def _hand_over(pipe: BinaryIO, result: bytes, in_loop: bool, run: int) -> None:
    pipe.write(json.dumps({"size": len(result), "in_loop": in_loop, "run": run}).encode() + b"\n")
    pipe.write(result)
    pipe.flush()


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


if __name__ == "__main__":
    main(sys.argv[1:])

"""An agent as a plain process: ``python -m spark_elastic.task.local_agent``, started by the local launcher.

The order arrives pickled on stdin and the outcome leaves pickled on stdout: pipes to and from the launcher itself.
"""

from __future__ import annotations

import pickle
import platform
import sys

from spark_elastic.membership.topology import SlotReport
from spark_elastic.task.agent import run_agent
from spark_elastic.task.main import die_with
from spark_elastic.wire.interfaces import interface_addresses


def main() -> None:
    launcher = int(sys.argv[1])
    die_with(launcher)
    order, slot, host, cores = pickle.load(sys.stdin.buffer)
    out = sys.stdout.buffer
    sys.stdout = sys.stderr  # stdout carries the outcome alone
    report = SlotReport(host, f"local-{slot}", interface_addresses(), cores, (), platform.python_version())
    outcome = run_agent(order, slot, 0, report)
    pickle.dump(outcome, out)
    out.flush()


if __name__ == "__main__":
    main()

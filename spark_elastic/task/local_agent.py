"""An agent as a plain process: ``python -m spark_elastic.task.local_agent LAUNCHER_PID``.

The local launcher starts it, writes the pickled order to its stdin and reads the pickled outcome from its stdout.
"""

from __future__ import annotations

import pickle
import platform
import sys

from spark_elastic.membership.topology import SlotReport
from spark_elastic.task.agent import run_agent
from spark_elastic.task.main import die_with_parent
from spark_elastic.wire.interfaces import interface_addresses


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    order, slot, host, cores = pickle.load(sys.stdin.buffer)
    out = sys.stdout.buffer
    sys.stdout = sys.stderr  # stdout carries the outcome alone
    report = SlotReport(host, f"local-{slot}", interface_addresses(), cores, (), platform.python_version())
    outcome = run_agent(order, slot, 0, report)
    pickle.dump(outcome, out)
    out.flush()


if __name__ == "__main__":
    main()

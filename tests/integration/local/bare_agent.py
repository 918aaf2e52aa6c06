"""An agent on a host without any interface that others reach: as `spark_elastic.task.agent` otherwise."""

import os
import pickle
import sys

from spark_elastic.membership.topology import SlotReport
from spark_elastic.task.agent import run_agent
from spark_elastic.task.main import die_with_parent

if __name__ == "__main__":
    die_with_parent(os.getppid())
    spec, slot, host, cores = pickle.load(sys.stdin.buffer)
    outcome = run_agent(spec, slot, 0, SlotReport(host, f"local-{slot}", {}, cores, ()))
    pickle.dump(outcome, sys.stdout.buffer)

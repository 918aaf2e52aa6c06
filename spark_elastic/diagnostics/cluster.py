"""What can be wrong with a cluster as Spark describes it: settings, slots, and who answers. Facts in, findings out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spark_elastic.diagnostics.findings import OK, PROBLEM, WARNING, Finding, counted


@dataclass(frozen=True)
class Slots:
    """now: task slots there are. most: what dynamic allocation may grow to; None: no bound. busy: tasks that run."""

    now: int
    most: int | None
    busy: int
    executors: int
    dynamic: bool
    task_cpus: str

    @property
    def free(self) -> int:
        return max(self.now - self.busy, 0)


def slots_for(slots: Slots, num_proc: int | None) -> Finding:
    facts = {
        "total": slots.now,
        "free": slots.free,
        "most": slots.most,
        "executors": slots.executors,
        "dynamic_allocation": slots.dynamic,
        "needed": num_proc,
    }
    says = f"{counted(slots.now, 'task slot')} on {counted(slots.executors, 'executor')}, {slots.free} free"
    need = num_proc or 1
    if slots.dynamic:
        bound = "without a bound" if slots.most is None else f"to {slots.most}"
        says += f"; dynamic allocation may grow them {bound}, without barrier mode, which is not needed"
        if slots.most is not None and slots.most < need:
            fix = f"raise spark.dynamicAllocation.maxExecutors, or train with num_proc={slots.most}"
            return Finding("task slots", PROBLEM, f"{says}; {need} are needed", fix, facts)
        return Finding("task slots", OK, says, facts=facts)
    cpus = f"spark.task.cpus={slots.task_cpus} takes so many cores a slot"
    if slots.now < need:
        fix = (
            f"add executors or cores, or lower num_proc to {slots.now}; {cpus}"
            if slots.now
            else (f"add executors, or check that the application got any (the master's page); {cpus}")
        )
        return Finding("task slots", PROBLEM, f"{says}; {need} are needed", fix, facts)
    if slots.free < need:
        says += f"; {need} have to be free at the same time to begin"
        return Finding("task slots", WARNING, says, "wait for the other jobs, or cancel them in Spark's UI", facts)
    return Finding("task slots", OK, says, facts=facts)


def who_came(
    looks: Sequence[Mapping[str, Any]], expected: Sequence[str], wanted: int, waited_s: float, error: str | None
) -> Finding:
    """expected: ids of the registered executors. wanted: probes that were sent. error: why the probes' job failed."""
    came = {str(look["executor"]) for look in looks}
    silent = sorted(set(expected) - came)
    facts = {"answered": sorted(came), "silent": silent, "probes": wanted, "error": error}
    if error is not None:
        fix = "the executors' logs say more (stderr in Spark's UI)"
        if "PYTHON_VERSION_MISMATCH" in error or "different minor version" in error:
            fix = "let PYSPARK_PYTHON, or spark.pyspark.python, name the same Python everywhere"
        says = f"the tasks that were to look around failed: {error}"
        return Finding("executors", PROBLEM, says, fix, facts)
    if not came:
        says = f"none of {wanted} tasks has run within {waited_s:.0f} s; {len(expected)} executors are registered"
        fix = "see in Spark's UI whether the slots are busy or executors are pending, and in their logs why they hang"
        return Finding("executors", PROBLEM, says, fix, facts)
    if silent:
        of = len(came) + len(silent)
        says = f"{len(came)} of {of} executors answered within {waited_s:.0f} s; not {_ids(silent)}"
        fix = "their slots are busy, or they hang: their logs and thread dumps in Spark's UI tell"
        return Finding("executors", WARNING, says, fix, facts)
    return Finding(
        "executors", OK, f"{counted(len(came), 'executor')} answered, with {len(looks)} of {wanted} tasks", facts=facts
    )


def gpus_of(amount: str | None, looks: Sequence[Mapping[str, Any]], torch: Mapping[str, Any]) -> Finding | None:
    """amount: spark.task.resource.gpu.amount. torch: as for `machine.torch_of`, by executor. None: nothing to say."""
    seen = [look for look in looks if look["nvidia_devices"]]
    facts = {
        "amount": amount,
        "addresses": {f"{look['executor']}/{look['number']}": look["gpus"] for look in looks},
        "torch": {name: answer["gpus"] for name, answer in torch.items() if isinstance(answer, Mapping)},
    }
    if not amount:
        if not seen:
            return None
        count, where = max(look["nvidia_devices"] for look in seen), f"executor {seen[0]['executor']}"
        says = f"{where} has {count} GPUs, but Spark hands none to tasks: workers of a host choose by local rank"
        fix = "set spark.{executor,task}.resource.gpu.amount and a discovery script (docs/gpus.md)"
        return Finding("GPUs", WARNING, says, fix, facts)
    without = [look for look in looks if not look["gpus"]]
    if without:
        says = f"spark.task.resource.gpu.amount={amount}, but a task on executor {without[0]['executor']} got none"
        fix = "check spark.executor.resource.gpu.amount and the discovery script on the executors"
        return Finding("GPUs", PROBLEM, says, fix, facts)
    blind = [name for name, answer in torch.items() if isinstance(answer, Mapping) and not answer["gpus"]]
    if blind:
        build = torch[blind[0]]["cuda_build"]
        says = f"tasks get GPUs, but torch on {blind[0]} sees none" + ("" if build else ": it is built without CUDA")
        fix = "install a CUDA build of torch there" if not build else "check the driver: nvidia-smi on that machine"
        return Finding("GPUs", PROBLEM, says, fix, facts)
    if shared := _shared_gpus(looks):
        says = f"GPU {shared[1]} of executor {shared[0]} is handed to more than one task at a time"
        fix = "set spark.task.resource.gpu.amount=1 for NCCL; workers that share a GPU reduce through Gloo"
        return Finding("GPUs", WARNING, says, fix, facts)
    return Finding("GPUs", OK, f"each of {len(looks)} tasks has a GPU of its own", facts=facts)


def _shared_gpus(looks: Sequence[Mapping[str, Any]]) -> tuple[str, str] | None:
    taken: set[tuple[str, str]] = set()
    for look in looks:
        for address in look["gpus"]:
            if (at := (str(look["executor"]), str(address))) in taken:
                return at
            taken.add(at)
    return None


def _ids(names: Sequence[str]) -> str:
    return ("executor " if len(names) == 1 else "executors ") + ", ".join(names[:5]) + (", …" if len(names) > 5 else "")

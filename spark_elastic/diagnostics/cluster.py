"""Judge what Spark says about its cluster: slots, executors that answer, GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spark_elastic.diagnostics.findings import OK, PROBLEM, WARNING, Finding, counted
from spark_elastic.diagnostics.probe import ProbeReport
from spark_elastic.driver.spark.cluster import SlotCount


def judge_slots(slots: SlotCount, num_proc: int | None, *, busy: int, dynamic: bool, task_cpus: str) -> Finding:
    """Compare the task slots with the workers that are to train.

    Args:
        slots: how many there are and can be.
        num_proc: workers that are to train; None for at least one.
        busy: tasks that run now.
        dynamic: True with dynamic allocation.
        task_cpus: the value of spark.task.cpus.
    """
    free = max(slots.now - busy, 0)
    facts = {
        "total": slots.now,
        "free": free,
        "most": slots.most,
        "executors": slots.executors,
        "dynamic_allocation": dynamic,
        "needed": num_proc,
    }
    says = f"{counted(slots.now, 'task slot')} on {counted(slots.executors, 'executor')}, {free} free"
    need = num_proc or 1
    if dynamic:
        bound = "without a bound" if slots.most is None else f"to {slots.most}"
        says += f"; dynamic allocation may grow them {bound}, without barrier mode, which is not needed"
        if slots.most is not None and slots.most < need:
            fix = f"raise spark.dynamicAllocation.maxExecutors, or train with num_proc={slots.most}"
            return Finding("task slots", PROBLEM, f"{says}; {need} are needed", fix, facts)
        return Finding("task slots", OK, says, facts=facts)
    if slots.now < need:
        fix = (
            f"add executors or cores, or lower num_proc to {slots.now}"
            if slots.now
            else "add executors, or check that the application got any (the master's page)"
        )
        fix += f"; each slot takes spark.task.cpus={task_cpus} cores"
        return Finding("task slots", PROBLEM, f"{says}; {need} are needed", fix, facts)
    if free < need:
        says += f"; {need} have to be free at the same time to begin"
        return Finding("task slots", WARNING, says, "wait for the other jobs, or cancel them in Spark's UI", facts)
    return Finding("task slots", OK, says, facts=facts)


def judge_executors(
    reports: Sequence[ProbeReport], expected: Sequence[str], wanted: int, waited_s: float, error: str | None
) -> Finding:
    """Name the executors that did not answer.

    Args:
        reports: from all probes that connected.
        expected: ids of the registered executors.
        wanted: number of probes that were started.
        waited_s: seconds that the doctor waited for them.
        error: why the probes' job failed; None if it did not.
    """
    answered = {str(report["executor"]) for report in reports}
    silent = sorted(set(expected) - answered)
    facts = {"answered": sorted(answered), "silent": silent, "probes": wanted, "error": error}
    if error is not None:
        fix = "the executors' logs say more (stderr in Spark's UI)"
        if "PYTHON_VERSION_MISMATCH" in error or "different minor version" in error:
            fix = "let PYSPARK_PYTHON, or spark.pyspark.python, name the same Python everywhere"
        return Finding("executors", PROBLEM, f"the doctor's tasks failed: {error}", fix, facts)
    if not answered:
        says = f"none of {wanted} tasks has run within {waited_s:.0f} s; {len(expected)} executors are registered"
        fix = "see in Spark's UI whether the slots are busy or executors are pending, and in their logs why they hang"
        return Finding("executors", PROBLEM, says, fix, facts)
    if silent:
        total = len(answered) + len(silent)
        names = ("executor " if len(silent) == 1 else "executors ") + ", ".join(silent[:5])
        names += ", …" if len(silent) > 5 else ""
        says = f"{len(answered)} of {total} executors answered within {waited_s:.0f} s; not {names}"
        fix = "their slots are busy, or they hang: see their logs and thread dumps in Spark's UI"
        return Finding("executors", WARNING, says, fix, facts)
    says = f"{counted(len(answered), 'executor')} answered, with {len(reports)} of {wanted} tasks"
    return Finding("executors", OK, says, facts=facts)


def judge_gpus(amount: str | None, reports: Sequence[ProbeReport], torch: Mapping[str, Any]) -> Finding | None:
    """Compare the GPUs that Spark gives to tasks with those that torch sees; None if there is no GPU.

    Args:
        amount: the value of spark.task.resource.gpu.amount.
        reports: from all probes.
        torch: by executor, the answer of `probe.import_torch` or the exception in its place.
    """
    facts = {
        "amount": amount,
        "addresses": {f"{report['executor']}/{report['number']}": report["gpus"] for report in reports},
        "torch": {name: answer["gpus"] for name, answer in torch.items() if isinstance(answer, Mapping)},
    }
    if not amount:
        with_gpus = [report for report in reports if report["nvidia_devices"]]
        if not with_gpus:
            return None
        count, where = max(each["nvidia_devices"] for each in with_gpus), f"executor {with_gpus[0]['executor']}"
        says = f"{where} has {count} GPUs, but Spark hands none to tasks: workers of a host choose by local rank"
        fix = "set spark.{executor,task}.resource.gpu.amount and a discovery script (docs/gpus.md)"
        return Finding("GPUs", WARNING, says, fix, facts)
    without = [report for report in reports if not report["gpus"]]
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
    if shared := _shared_gpu(reports):
        says = f"GPU {shared[1]} of executor {shared[0]} is handed to more than one task at a time"
        fix = "set spark.task.resource.gpu.amount=1 for NCCL; workers that share a GPU reduce through Gloo"
        return Finding("GPUs", WARNING, says, fix, facts)
    return Finding("GPUs", OK, f"each of {len(reports)} tasks has a GPU of its own", facts=facts)


def _shared_gpu(reports: Sequence[ProbeReport]) -> tuple[str, str] | None:
    """Return the executor and address of a GPU that two tasks got; None if there is none."""
    seen: set[tuple[str, str]] = set()
    for report in reports:
        for address in report["gpus"]:
            if (gpu := (str(report["executor"]), str(address))) in seen:
                return gpu
            seen.add(gpu)
    return None

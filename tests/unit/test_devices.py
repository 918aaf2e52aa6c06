"""Which device a worker computes on, and how GPUs are reduced: choices from facts, without a GPU."""

import pytest

from spark_elastic.collective.gpu.devices import DeviceInfo, MemberDevice, choose_backend, choose_device
from spark_elastic.errors import InvalidSettingsError
from spark_elastic.jobs.start import gpus_in_words
from spark_elastic.task.worker_process import worker_environment
from spark_elastic.wire.messages import LaunchSpec

NONE = DeviceInfo("2.7.0+cpu", None, 0)
BLIND = DeviceInfo("2.7.0", "12.6", 0)
ONE = DeviceInfo("2.7.0", "12.6", 1)
FOUR = DeviceInfo("2.7.0", "12.6", 4)


@pytest.mark.parametrize(
    ("asked", "seen", "local_rank", "device"),
    [
        (None, NONE, 0, "cpu"),
        ("auto", NONE, 0, "cpu"),
        ("auto", BLIND, 0, "cpu"),
        ("auto", ONE, 3, "cuda:0"),
        ("auto", FOUR, 2, "cuda:2"),
        ("auto", FOUR, 5, "cuda:1"),
        ("cpu", FOUR, 0, "cpu"),
        ("cuda", ONE, 3, "cuda:0"),
        ("cuda", FOUR, 3, "cuda:3"),
        ("cuda:1", FOUR, 3, "cuda:1"),
    ],
)
def test_a_worker_takes_its_own_gpu_or_leases_one(asked, seen, local_rank, device):
    assert choose_device(asked, seen, lambda gpus: (local_rank % gpus, "leased")).device == device


@pytest.mark.parametrize(
    ("asked", "seen", "says"),
    [
        ("cuda", NONE, "sees no GPU in this worker (torch 2.7.0+cpu is built without CUDA"),
        ("cuda", BLIND, "is built for CUDA 12.6"),
        ("cuda:7", FOUR, "torch sees 4 GPUs"),
        ("gpu", FOUR, "device='gpu'"),
    ],
)
def test_a_device_that_is_not_there_is_an_error_with_a_remedy(asked, seen, says):
    with pytest.raises(InvalidSettingsError) as raised:
        choose_device(asked, seen, lambda gpus: (0, "leased"))
    assert says in str(raised.value)
    if asked != "gpu":
        assert "spark.task.resource.gpu.amount" in str(raised.value)
        assert "device='auto'" in str(raised.value)


def gpus(*uuids, nccl=(2, 27)):
    return [MemberDevice(uuid, nccl) for uuid in uuids]


@pytest.mark.parametrize(
    ("those", "wanted", "reason"),
    [
        (gpus("a", "b", "a"), "auto", "ranks 0 and 2 share one GPU"),
        (gpus("a", "b", nccl=(2, 21)), "auto", "NCCL 2.21 cannot be aborted safely"),
        ([*gpus("a"), MemberDevice("b", (2, 28))], "auto", "different versions"),
        ([*gpus("a"), MemberDevice("", (0, 0), "it is built without NCCL")], "auto", "rank 1 cannot use NCCL"),
        (gpus("a", "b"), "gloo", "SPARK_ELASTIC_REDUCTION=gloo"),
    ],
)
def test_gloo_is_chosen_with_a_reason_if_nccl_cannot_be_used(those, wanted, reason):
    assert choose_backend(gpus("a", "b", "c"), "auto").device == "nccl"
    chosen = choose_backend(those, wanted)
    assert chosen.device == "gloo"
    assert reason in chosen.reason


def test_a_job_on_cpus_hides_the_gpus_from_its_workers_and_one_task_sees_its_own_alone():
    spec = LaunchSpec("job", (), b"", b"", 1.0, "", device="cpu")
    assert worker_environment(spec, {}, [], 1, ["2"])["CUDA_VISIBLE_DEVICES"] == ""
    spec = LaunchSpec("job", (), b"", b"", 1.0, "")
    made = worker_environment(spec, {"CUDA_VISIBLE_DEVICES": "0,1,2"}, [], 1, ["2"])
    assert made["CUDA_VISIBLE_DEVICES"] == "2"
    assert made["SPARK_ELASTIC_DEVICE"] == "auto"
    assert made["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert "CUDA_VISIBLE_DEVICES" not in worker_environment(spec, {}, [], 1, [])


@pytest.mark.parametrize(
    ("amount", "resources", "says"),
    [
        (None, {}, ""),
        ("1.0", {}, ""),
        ("0", {}, ""),
        ("many", {}, ""),
        (None, {"cpus": 2}, ""),
        ("0.5", {"gpu": 1}, ""),
        ("2", {}, "spark.task.resource.gpu.amount=2, and a worker computes on one GPU; set it to 1"),
        ("2", {"gpu": 1, "cpus": 3}, "amount=2: each worker gets one of them, as with resources={'gpu': 1, 'cpus': 3}"),
        ("0.25", {}, "spark.task.resource.gpu.amount=0.25: workers that share a GPU reduce gradients through"),
        ("1", {"gpu": 2}, "resources={'gpu': 2}, and a worker computes on one GPU; set it to 1"),
        ("1", {"gpu": 0.5}, "resources={'gpu': 0.5}: workers that share a GPU reduce gradients through"),
    ],
)
def test_a_job_whose_tasks_have_not_one_gpu_each_says_what_follows(amount, resources, says):
    assert says in gpus_in_words(amount, resources)
    assert bool(says) == bool(gpus_in_words(amount, resources))

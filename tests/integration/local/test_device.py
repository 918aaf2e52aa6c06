"""What a job says of devices, in real workers of a machine without a GPU."""

import os

import pytest
import torch

import spark_elastic
import spark_elastic.torch as hvd
from spark_elastic.errors import UserFunctionError

pytestmark = pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there is a GPU; see tests/gpu")


def where():
    hvd.init()
    return str(hvd.device()), os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.mark.nightly
def test_a_worker_computes_on_the_cpu_where_there_is_no_gpu_and_is_told_of_none_if_that_was_asked_for():
    launcher = spark_elastic.LocalLauncher()
    assert spark_elastic.run(where, num_proc=1, device="cpu", launcher=launcher) == [("cpu", "")]
    assert spark_elastic.run(where, num_proc=1, launcher=spark_elastic.LocalLauncher())[0][0] == "cpu"


def test_a_gpu_that_is_demanded_and_not_there_is_said_before_the_function_runs(tmp_path):
    ran = tmp_path / "ran"

    def train():
        ran.touch()

    with pytest.raises(UserFunctionError) as raised:
        spark_elastic.run(train, num_proc=2, device="cuda", launcher=spark_elastic.LocalLauncher())
    assert "InvalidSettingsError: device='cuda', but torch sees no GPU in this worker" in str(raised.value)
    assert "spark.task.resource.gpu.amount" in str(raised.value)
    assert not ran.exists()

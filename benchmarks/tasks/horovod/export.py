"""Export to ONNX, torch.export and TorchScript, with Horovod."""

import onnx
import torch
from horovod.spark.common.store import Store
from horovod.spark.torch import TorchEstimator
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from torch import nn


class Points(nn.Module):
    """Takes each column as an input of its own, as the estimator gives them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, x, y):
        return self.layers(torch.cat([x, y], dim=1))


spark = SparkSession.builder.master("local[3]").getOrCreate()
rows = spark.range(500).select(F.randn(seed=1).alias("x"), F.randn(seed=2).alias("y"))
rows = rows.withColumn("label", (F.col("x") > F.col("y")).cast("int"))

net = Points()
estimator = TorchEstimator(
    num_proc=2,
    store=Store.create("/tmp/horovod"),
    model=net,
    optimizer=torch.optim.Adam(net.parameters(), lr=0.01),
    loss=lambda output, label: nn.functional.cross_entropy(output, label.long()),
    feature_cols=["x", "y"],
    label_cols=["label"],
    input_shapes=[[-1, 1], [-1, 1]],
    batch_size=50,
    epochs=1,
)
module = estimator.fit(rows).getModel().layers

example = torch.randn(4, 2)
shapes = [{0: torch.export.Dim("rows")}]
torch.onnx.export(module, (example,), "points.onnx", input_names=["features"], dynamic_shapes=shapes)
onnx.checker.check_model("points.onnx")

program = torch.export.export(module, (example,), dynamic_shapes=shapes)
torch.export.save(program, "points.pt2")

torch.jit.save(torch.jit.trace(module, example), "points.torchscript")

again = torch.export.load("points.pt2").module()
scripted = torch.jit.load("points.torchscript")
many = torch.randn(100, 2)
assert torch.allclose(again(many), module(many), atol=1e-6)
assert torch.allclose(scripted(many), module(many), atol=1e-6)

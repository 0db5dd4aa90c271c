"""Data-parallel training of a converted model gives the gradients of one process."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autoprec

WORKER = Path(__file__).with_name("parallel_worker.py")
ROOT = Path(__file__).parents[2]
WAYS = "ddp of converted,converted ddp,compiled ddp,sharded after,sharded before"


def test_two_processes_give_the_gradients_of_one(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(WORKER)]
    workers = [
        subprocess.Popen(
            [*command, str(rank), "2", str(tmp_path / "store"), WAYS],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    outputs = [worker.communicate(timeout=300) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], outputs[0][1] + outputs[1][1]
    lines = dict(line.split("=") for line in outputs[0][0].splitlines())
    assert list(lines) == WAYS.split(",")
    for way, error in lines.items():
        assert float(error) < 0.01, way  # one process sums the batch in one product, two in halves


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.w = nn.Linear(8, 8), nn.Linear(8, 4), nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return torch.softmax(self.b(torch.relu(self.a(x))) @ self.w, -1)


def converted():
    torch.manual_seed(0)
    return autoprec.convert(Net(), target="a100")


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("order", ["convert first", "wrap first"])
def test_ddp_of_one_process_is_bit_equal(order):
    x = torch.randn(3, 8)
    want = converted()
    want(x).square().sum().backward()
    if order == "convert first":
        model = nn.parallel.DistributedDataParallel(converted())
    else:
        model = autoprec.convert(nn.parallel.DistributedDataParallel(autoprec.revert(converted())), target="a100")
    model(x).square().sum().backward()
    for p, q in zip(model.parameters(), want.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("order", ["convert first", "shard first"])
@pytest.mark.parametrize("shard_layers", [True, False])
def test_fully_shard_of_one_process_is_bit_equal(order, shard_layers, gemms):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    x = torch.randn(3, 8)
    want = converted()
    want(x).square().sum().backward()
    model = converted() if order == "convert first" else autoprec.revert(converted())
    mesh = init_device_mesh("cpu", (1,))
    for layer in (model.a, model.b) if shard_layers else ():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if order == "shard first":
        autoprec.convert(model, target="a100")
    with gemms() as seen:
        model(x).square().sum().backward()
    assert seen.dtypes == {torch.bfloat16}
    for p, q in zip(model.parameters(), want.parameters(), strict=True):
        assert torch.equal(p.grad.full_tensor(), q.grad)
    plain = autoprec.revert(copy.copy(want))
    autoprec.revert(model)
    torch.testing.assert_close(model(x), plain(x))
    assert isinstance(model, Net)

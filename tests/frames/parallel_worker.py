"""One of several processes that train a converted model together; run by test_parallel.py.

    parallel_worker.py RANK WORLD STORE WAY

Rank 0 prints the largest relative difference of a gradient to that of one process on the whole batch.
"""

import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import autoprec


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16)
        self.w = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x):
        h = self.b(torch.relu(self.norm(self.a(x))))
        return torch.softmax(h @ self.w, -1) @ self.w


def build():
    torch.manual_seed(0)
    return Net()


def convert(model):
    return autoprec.convert(model, target="a100")


def sharded(model, mesh):
    for layer in (model.a, model.b):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


WAYS = {
    "ddp of converted": lambda mesh: DDP(convert(build())),
    "converted ddp": lambda mesh: convert(DDP(build())),
    "compiled ddp": lambda mesh: torch.compile(DDP(convert(build())), backend="aot_eager"),
    "sharded after": lambda mesh: sharded(convert(build()), mesh),
    "sharded before": lambda mesh: convert(sharded(build(), mesh)),
}


def full(gradient):
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def gradients(model):
    return {name.rpartition("module.")[2]: full(p.grad) for name, p in model.named_parameters()}


def main():
    rank, world, store, ways = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4].split(",")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (world,))
    torch.manual_seed(1)
    batch = torch.randn(4 * world, 16)
    alone = convert(build())
    alone(batch).square().mean().backward()
    want = gradients(alone)
    for way in ways:
        model = WAYS[way](mesh)
        model(batch[rank * 4 : rank * 4 + 4]).square().mean().backward()
        got = gradients(model)
        assert got.keys() == want.keys()
        if rank == 0:
            error = max(float((got[name] - g).norm() / g.norm()) for name, g in want.items())
            print(f"{way}={error:.6f}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

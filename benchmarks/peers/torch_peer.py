"""torch DistributedDataParallel over Gloo."""

import os

import protocol
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
host, port = os.environ["BENCH_ADDRESS"].split(":")
os.environ.update(MASTER_ADDR=host, MASTER_PORT=port)
layers: list[torch.nn.Module] = []
for kernel, bias in protocol.WEIGHTS:
    linear = torch.nn.Linear(*kernel.shape)
    with torch.no_grad():
        linear.weight.copy_(torch.from_numpy(kernel.T))
        linear.bias.copy_(torch.from_numpy(bias))
    layers += [linear, torch.nn.ReLU()]
model: torch.nn.Module = torch.nn.Sequential(*layers[:-1])
if protocol.WORLD > 1:
    distributed.init_process_group(
        "gloo", rank=protocol.RANK, world_size=protocol.WORLD
    )
    model = DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), protocol.LEARNING_RATE, eps=1e-8)


def train(start: int, count: int) -> float:
    """Steps as in torch's own tutorial."""
    for i in range(start, start + count):
        x, y = map(torch.from_numpy, protocol.local_batch(i))
        optimizer.zero_grad(set_to_none=True)
        loss = torch.nn.functional.cross_entropy(model(x), y.long())
        loss.backward()
        optimizer.step()
    total = loss.detach() / protocol.WORLD
    if protocol.WORLD > 1:
        distributed.all_reduce(total)
    return float(total)


protocol.serve(train)

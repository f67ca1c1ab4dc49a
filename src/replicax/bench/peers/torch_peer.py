"""torch on the CPU: one process, or DistributedDataParallel over Gloo."""

import os

import protocol
import torch
import torch_models
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(protocol.CORES)
resident = protocol.resident_bytes()
model: nn.Module = torch_models.build(protocol.CASE)
if protocol.WORLD > 1:
    host, port = protocol.ADDRESSES[0].rsplit(":", 1)
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=port)
    distributed.init_process_group(
        "gloo", rank=protocol.RANK, world_size=protocol.WORLD
    )
    # Buffers are broadcast, torch's default: moving statistics stay alike everywhere.
    model = DistributedDataParallel(
        model, gradient_as_bucket_view=True, static_graph=True
    )
optimizer = torch.optim.Adam(
    model.parameters(), protocol.CASE.learning_rate, eps=1e-7, fused=True
)


def train(start: int, count: int) -> float:
    """Steps in a loop of one's own; the last one's mean loss over all processes."""
    loss = torch.zeros(())
    for i in range(start, start + count):
        x, y = map(torch.from_numpy, protocol.local_batch(i))
        loss = torch_models.loss_of(protocol.CASE, model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    total = loss.detach() / protocol.WORLD
    if protocol.WORLD > 1:
        distributed.all_reduce(total)
    return float(total)


protocol.serve(train, resident=resident)

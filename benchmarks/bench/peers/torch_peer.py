"""torch: one process, or on CPUs DistributedDataParallel over Gloo.

On a GPU it is compiled, with automatic mixed precision.
"""

import os
from typing import Any

import protocol
import torch
import torch_models
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel


def compress(
    state: distributed.ProcessGroup | None, bucket: distributed.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """torch's own hook, which DDP refuses by its name if there is no CUDA."""
    return default_hooks.bf16_compress_hook(state, bucket)


torch.set_num_threads(protocol.CORES)
resident = protocol.resident_bytes()
device = torch.device(protocol.PLATFORM)
torch.backends.cudnn.benchmark = True  # Shapes never change.
model: nn.Module = torch_models.build(protocol.CASE).to(device)
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
    if protocol.COMPRESSION == "bfloat16":
        model.register_comm_hook(None, compress)
optimizer: torch.optim.Optimizer
if protocol.CASE.momentum:
    optimizer = torch.optim.SGD(
        model.parameters(),
        protocol.CASE.learning_rate,
        protocol.CASE.momentum,
        fused=True,
    )
else:
    optimizer = torch.optim.Adam(
        model.parameters(), protocol.CASE.learning_rate, eps=1e-7, fused=True
    )


def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The mean loss of a batch."""
    return torch_models.loss_of(protocol.CASE, model(x), y)


def loss_in_bfloat16(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The same with automatic mixed precision."""
    with torch.autocast(device.type, torch.bfloat16):
        return loss_of(x, y)


def batch_of(index: int) -> tuple[torch.Tensor, ...]:
    """This process' part of a batch, on the device."""
    return tuple(torch.from_numpy(a).to(device) for a in protocol.local_batch(index))


mean_loss: Any = loss_of if protocol.CASE.dtype == "float32" else loss_in_bfloat16
held: list[tuple[torch.Tensor, ...]] = []
if protocol.ACCELERATED:
    mean_loss = torch.compile(mean_loss)
    held = [batch_of(i) for i in range(protocol.NUM_BATCHES)]


def train(start: int, count: int) -> float:
    """Steps in a loop of one's own; the last one's mean loss over all processes."""
    loss = torch.zeros(())
    for i in range(start, start + count):
        loss = mean_loss(*(held[i % len(held)] if held else batch_of(i)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    total = loss.detach() / protocol.WORLD
    if protocol.WORLD > 1:
        distributed.all_reduce(total)
    return float(total)


def wait() -> None:
    """Wait for the weights."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def device_peak() -> int:
    """The largest memory of tensors."""
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else 0


protocol.serve(train, resident=resident, wait=wait, device_peak=device_peak)

"""What the figures of the strategies show: a few words of data for each.

`draw_figures.py` draws them. A row of devices, each with what it holds; buses below
them, by which gradients, weights or activations move; stores below those, where a
strategy keeps variables apart from the devices that compute.
"""

from dataclasses import dataclass

WHOLE = (1, (0,))
"""All of the weights, state or gradients, in one piece."""

Part = tuple[int, tuple[int, ...]]
"""Into how many parts something is cut, and which of them are here."""


@dataclass(frozen=True, kw_only=True)
class Box:
    """A device, or a place that stores variables.

    Attributes:
        name: Its name, such as `gpu:0`.
        host: The machine it belongs to.
        weights: Which part of the weights it holds; None: none.
        state: Which part of the optimizer state it holds; None: none.
        gradients: Which part of the gradients it computes, if it computes.
        weights_are_copies: Whether the weights are copies for a step only.
    """

    name: str
    host: str
    weights: Part | None = WHOLE
    state: Part | None = WHOLE
    gradients: Part = WHOLE
    weights_are_copies: bool = False


@dataclass(frozen=True, kw_only=True)
class Bus:
    """Something that moves between the devices, or between them and the stores.

    Attributes:
        kind: `gradients`, `weights` or `activations`: the colour.
        label: What moves, and when.
        heads: Where arrows point: `both`, `down` to the stores, `up` from them.
        groups: Which devices take part, side by side; none: all of them together.
    """

    kind: str
    label: str
    heads: str = "both"
    groups: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One strategy.

    Attributes:
        name: The file's name, without suffix.
        title: A short name for it.
        text: What is to be seen, for those who do not see it.
        batch: Labels of the parts of the data, one for each replica.
        devices: What computes, from left to right.
        buses: What moves, from top to bottom.
        stores: Where variables are, if not on the devices.
        batches_are_apart: Whether the parts are batches of their own.
        encloses_stores: Whether devices and stores are of one machine.
        note: What happens then, in one line.
    """

    name: str
    title: str
    text: str
    batch: tuple[str, ...]
    devices: tuple[Box, ...]
    buses: tuple[Bus, ...] = ()
    stores: tuple[Box, ...] = ()
    batches_are_apart: bool = False
    encloses_stores: bool = False
    note: str


def rows(num_replicas: int, batch_size: int) -> tuple[str, ...]:
    """Labels of the replicas' rows of a global batch."""
    own = batch_size // num_replicas
    return tuple(f"rows {i * own}-{(i + 1) * own - 1}" for i in range(num_replicas))


ONE_DEVICE = Figure(
    name="one-device",
    title="OneDeviceStrategy",
    text="The whole batch goes to one device, which holds all weights and optimizer "
    "state, and applies its gradients itself. Nothing travels.",
    batch=("rows 0-63",),
    devices=(Box(name="gpu:0", host="one machine"),),
    note="The device makes the update with its own gradients: nothing travels.",
)

MIRRORED = Figure(
    name="mirrored",
    title="MirroredStrategy",
    text="The global batch is cut into four parts, one for each device of a machine. "
    "Each device holds all weights and optimizer state. The gradients of all devices "
    "are summed by an all-reduce, and each device makes the same update.",
    batch=rows(4, 64),
    devices=tuple(Box(name=f"gpu:{i}", host="one machine") for i in range(4)),
    buses=(Bus(kind="gradients", label="all-reduce: the sum goes to every device"),),
    note="Every device makes the same update, so the copies stay equal.",
)

MULTI_WORKER = Figure(
    name="multi-worker",
    title="MultiWorkerMirroredStrategy",
    text="Two machines with two devices each. The global batch is cut into four parts. "
    "Every device of every machine holds all weights and optimizer state. Gradients "
    "are summed over the devices of both machines, by the network between them.",
    batch=rows(4, 64),
    devices=tuple(Box(name=f"gpu:{i % 2}", host=f"worker:{i // 2}") for i in range(4)),
    buses=(
        Bus(kind="gradients", label="all-reduce, within machines and between them"),
    ),
    note="Every device of every worker makes the same update.",
)

CENTRAL_STORAGE = Figure(
    name="central-storage",
    title="CentralStorageStrategy",
    text="Weights and optimizer state are stored once, on the parameter device. Each "
    "step copies the weights to the compute devices, which have a part of the batch "
    "each. Their gradients are summed and go to the parameter device, which makes the "
    "update.",
    batch=rows(2, 64),
    devices=tuple(
        Box(name=f"gpu:{i}", host="one machine", state=None, weights_are_copies=True)
        for i in range(2)
    ),
    buses=(
        Bus(kind="gradients", label="gradients, summed", heads="down"),
        Bus(kind="weights", label="weights, copied in each step", heads="up"),
    ),
    stores=(Box(name="cpu:0, the parameter device", host="one machine"),),
    encloses_stores=True,
    note="The update is made on the parameter device.",
)

PARAMETER_SERVERS = Figure(
    name="parameter-servers",
    title="ParameterServerStrategy",
    text="Three workers, each with a batch of its own, and two servers. The servers "
    "hold a part of the weights and optimizer state each. A worker pushes gradients to "
    "both servers when it has them, and pulls the newest weights. No worker waits for "
    "another.",
    batch=("batch 17", "batch 19", "batch 18"),
    devices=tuple(
        Box(name=f"worker:{i}", host=f"host {h}", state=None, weights_are_copies=True)
        for i, h in enumerate("abc")
    ),
    buses=(
        Bus(kind="gradients", label="push, each worker in its own time", heads="down"),
        Bus(kind="weights", label="pull: the newest weights", heads="up"),
    ),
    stores=tuple(
        Box(name=f"ps:{i}", host=f"host {h}", weights=(2, (i,)), state=(2, (i,)))
        for i, h in enumerate("de")
    ),
    batches_are_apart=True,
    note="A server makes its part of the update as soon as gradients come.",
)

TPU = Figure(
    name="tpu",
    title="TPUStrategy",
    text="A slice of two hosts with four chips each. Each chip holds all weights and "
    "optimizer state and has an eighth of the global batch. Gradients are summed over "
    "the chips' own interconnect.",
    batch=("0-15", "16-31", "32-47", "48-63", "64-79", "80-95", "96-111", "112-127"),
    devices=tuple(Box(name=f"chip {i}", host=f"host {i // 4}") for i in range(8)),
    buses=(Bus(kind="gradients", label="all-reduce over the chips' own interconnect"),),
    note="Every chip makes the same update.",
)

FULLY_SHARDED = Figure(
    name="fully-sharded",
    title="FullyShardedStrategy",
    text="Four devices hold a quarter of the weights and of the optimizer state each, "
    "and have a quarter of the global batch each. A layer's weights are gathered when "
    "it computes, in the forward and in the backward pass. Each device gets its "
    "quarter of the summed gradients.",
    batch=rows(4, 64),
    devices=tuple(
        Box(
            name=f"gpu:{i}",
            host="one machine",
            weights=(4, (i,)),
            state=(4, (i,)),
        )
        for i in range(4)
    ),
    buses=(
        Bus(kind="weights", label="all-gather, a layer's weights: forward, backward"),
        Bus(kind="gradients", label="reduce-scatter: to each its part of the sum"),
    ),
    note="Each device updates its part of the weights.",
)

MODEL_PARALLEL = Figure(
    name="model-parallel",
    title="ModelParallelStrategy",
    text="Four devices are two replicas of two devices each. Each replica has half of "
    "the global batch. Each device holds half of every layer's weights and optimizer "
    "state, and computes their gradients. Activations travel between the two devices "
    "of a replica, in every layer; gradients are summed between devices that hold the "
    "same half.",
    batch=rows(2, 64),
    devices=tuple(
        Box(
            name=f"gpu:{i}",
            host=f"replica {i // 2}",
            weights=(2, (i % 2,)),
            state=(2, (i % 2,)),
            gradients=(2, (i % 2,)),
        )
        for i in range(4)
    ),
    buses=(
        Bus(kind="activations", label="activations", groups=((0, 1), (2, 3))),
        Bus(kind="gradients", label="all-reduce between devices with the same part"),
    ),
    note="Each device updates its part; replicas stay equal.",
)

SHARDED_UPDATE = Figure(
    name="sharded-update",
    title="shard_update=True",
    text="Four devices hold all weights and a quarter of the optimizer state each. "
    "Each gets its quarter of the summed gradients, updates that quarter of the "
    "weights, and sends it to all others.",
    batch=rows(4, 64),
    devices=tuple(
        Box(name=f"gpu:{i}", host="one machine", state=(4, (i,))) for i in range(4)
    ),
    buses=(
        Bus(kind="gradients", label="reduce-scatter: to each its part of the sum"),
        Bus(kind="weights", label="all-gather: each part of the new weights to all"),
    ),
    note="Each device makes its part of the update.",
)

FIGURES = (
    ONE_DEVICE,
    MIRRORED,
    MULTI_WORKER,
    CENTRAL_STORAGE,
    PARAMETER_SERVERS,
    TPU,
    FULLY_SHARDED,
    MODEL_PARALLEL,
    SHARDED_UPDATE,
)
"""All of them; each is drawn as `figures/<name>.svg`."""

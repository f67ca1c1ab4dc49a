"""Arrays in blocks are gathered and cut."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from replicax.engine.blocks import Block, BlockedValues, cut
from replicax.engine.replica_axis import ReplicaAxis


def axis_of(num: int) -> ReplicaAxis:
    return ReplicaAxis(
        name="replica",
        devices=tuple(f"cpu:{i}" for i in range(num)),
        num_per_host=num,
    )


WHOLE = P()


def on_devices(body: Callable[..., Any], num: int, in_specs: Any = WHOLE) -> Any:
    """`body` on `num` devices; results of all devices, `[num, ...]`."""
    return jax.jit(
        jax.shard_map(
            lambda *args: jax.tree.map(lambda x: jnp.asarray(x)[None], body(*args)),
            mesh=Mesh(np.array(jax.devices()[:num]), ("replica",)),
            in_specs=in_specs,
            out_specs=P("replica"),
            check_vma=False,
        )
    )


def test_block_of_a_gathered_array() -> None:
    axis = axis_of(2)

    def body(data: Any) -> Any:
        blocked = BlockedValues(axis)
        array = blocked.whole(Block(data, 0))
        assert array.shape == (8, 2)
        block = blocked.block_of(array)
        assert block is not None
        assert block.data is data
        assert blocked.block_of(array + 1) is None
        return cut(array, 1, axis).data

    x = np.arange(16.0, dtype="float32").reshape(8, 2)
    columns = on_devices(body, 2, P("replica"))(x)
    np.testing.assert_array_equal(columns, [x[:, :1], x[:, 1:]])

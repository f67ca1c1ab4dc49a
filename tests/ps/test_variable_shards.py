"""A server steps neighbouring shards as one: each has its own values and slots."""

import keras
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from replicax.ps.group_vectors import SlotKey
from replicax.ps.optimizers import optimizer_rule
from replicax.ps.partition import VariableGroup, VariableShard
from replicax.ps.server_optimizer import ServerOptimizer

NOT_NEGATIVE = keras.constraints.serialize(keras.constraints.NonNeg())
SHARDS = st.lists(
    st.tuples(
        st.lists(st.integers(1, 3), max_size=2).map(tuple),
        st.sampled_from(["float32", "float16"]),
        st.sampled_from([None, NOT_NEGATIVE]),
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
)


@settings(database=None, max_examples=30)
@given(SHARDS)
def test_each_shard_is_updated_with_its_own_gradient_and_slots(drawn) -> None:
    shards = [
        VariableShard(
            variable=i,
            path=f"v{i}",
            shape=shape,
            dtype=dtype,
            server=0,
            constraint=constraint,
        )
        for i, (shape, dtype, constraint, _) in enumerate(drawn)
    ]
    rule = optimizer_rule(keras.optimizers.SGD(1.0, momentum=0.5), [])
    rule["no_weight_decay"] = [i for i, each in enumerate(drawn) if each[-1]]
    group = VariableGroup(name="g", rule=rule, shards=tuple(shards))
    optimizer = ServerOptimizer(group, 0)
    lengths = group.lengths_on(0)
    gradients = {d: np.arange(n, dtype=d) for d, n in lengths.items()}
    values, state = optimizer.start({d: 2 * g for d, g in gradients.items()})
    values, state = optimizer.apply(values, state, gradients)
    for dtype, gradient in gradients.items():
        np.testing.assert_array_equal(values[dtype], gradient)

    starts = dict.fromkeys(lengths, 0)
    slots = optimizer.slots(state)
    for i, shard in enumerate(shards):
        start = starts[shard.dtype]
        starts[shard.dtype] = start + shard.size
        expected = -gradients[shard.dtype][start : start + shard.size]
        momentum = slots[SlotKey("momentum", i)]
        np.testing.assert_array_equal(momentum, expected.reshape(shard.shape))
    changed = {
        SlotKey("momentum", i): np.full(p.shape, i) for i, p in enumerate(shards)
    }
    again = optimizer.slots(optimizer.with_slots(state, changed))
    for key, value in changed.items():
        np.testing.assert_array_equal(again[key], value)
    assert {k for k in slots if k.shard is not None} == set(changed)

"""Seeds of random numbers: each replica its own, as XLA for GPUs compiles them."""

import jax
import jax.numpy as jnp
import numpy as np

from replicax.engine.variables import fold_replica_into_seed, restore_seed


def step(state: jax.Array, replica_id: jax.Array) -> tuple[jax.Array, jax.Array]:
    own = fold_replica_into_seed(state, replica_id)
    return own, restore_seed(own + jnp.array([0, 1], state.dtype), state)


def test_replicas_have_seeds_of_their_own_and_the_first_one_the_given() -> None:
    state = jnp.array([7, 3], "uint32")
    steps = [step(state, jnp.int32(i)) for i in range(4)]
    assert len({int(own[0]) for own, _ in steps}) == 4
    np.testing.assert_array_equal(steps[0][0], state)
    for own, after in steps:
        assert own[1] == 3
        assert own.dtype == after.dtype == jnp.uint32
        np.testing.assert_array_equal(after, [7, 4])


def test_nothing_of_a_seed_is_changed_in_place() -> None:
    # XLA for GPUs (JAX 0.10.2) does not compile a step of one replica that does it.
    lowered = jax.jit(step).lower(jnp.array([7, 3], "uint32"), jnp.int32(1)).as_text()
    assert "scatter" not in lowered
    assert "dynamic_update_slice" not in lowered

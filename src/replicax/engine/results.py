"""What a replica function returns, as arrays of a program and as values of replicas."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from replicax.engine.composites import described, is_composite, stacked
from replicax.engine.values import PerReplica

__all__ = ["ResultStructure"]


class ResultStructure:
    """The structure of a replica function's results.

    Args:
        out: What the function returns for one replica.
        name: How messages call the function.
        only_dense: Whether replicas' results are put together, which takes dense ones.

    Raises:
        TypeError: If a composite array is returned where results are put together.
    """

    def __init__(self, out: Any, name: str, *, only_dense: bool = False) -> None:
        self._name = name
        self._structure = jax.tree.structure(out)
        flat, self._values = jax.tree.flatten(out, is_leaf=is_composite)
        composites = [x for x in flat if is_composite(x)]
        if composites and only_dense:
            raise TypeError(
                f"{name}: returned {described(composites[0])}. The replicas' results "
                "are put together, which needs dense arrays: return x.todense()."
            )
        self._has_composites = bool(composites)
        self._composites = [
            jax.tree.structure(x) if is_composite(x) else None for x in flat
        ]

    def arrays(self, out: Any) -> list[jax.Array]:
        """The arrays of such results.

        Raises:
            TypeError: For anything else.
        """
        return [self._as_array(x) for x in jax.tree.leaves(out)]

    def unflatten(self, arrays: Sequence[Any]) -> Any:
        """The results, of their arrays."""
        return jax.tree.unflatten(self._structure, arrays)

    def per_replica(self, out: Any) -> Any:
        """Results of arrays `[R, ...]` as values of replicas."""
        if not self._has_composites:
            return jax.tree.map(PerReplica, out)
        parts = iter(jax.tree.leaves(out))
        values = [
            next(parts)
            if structure is None
            else stacked(structure, [next(parts) for _ in range(structure.num_leaves)])
            for structure in self._composites
        ]
        return jax.tree.unflatten(self._values, map(PerReplica, values))

    def _as_array(self, x: Any) -> jax.Array:
        if isinstance(x, keras.Variable):
            x = x.value
        if isinstance(x, jax.Array | np.ndarray | np.generic | int | float | complex):
            return jnp.asarray(x)
        raise TypeError(
            f"{self._name}: the function returned {x!r} of type {type(x).__name__}; "
            "return arrays, numbers, None, or pytrees of them."
        )

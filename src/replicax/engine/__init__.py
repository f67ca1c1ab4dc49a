"""The engine: a replica function becomes one XLA program.

`program` is the way through; the other modules are its parts. The engine knows Keras by
its variables and scopes, and nothing of models, data or strategies.

Discovery. The recording scope is entered outside the abstract trace. Variables that the
function creates, such as those of an unbuilt model or an optimizer's slots, are
registered in it and initialised for real when it closes. A variable that first appears
in a later trace is an error: Python state must not decide which variables a step uses.

Sums. A variable of aggregation `"sum"`, as metrics have it, is split on the way in and
summed on the way out, so a step may add to it, reset it, read its share or decay it.
All shares but the first have their low bits cut off, so that this loses nothing.

Donation. The arrays of written variables are donated, so an update needs no second copy
of weights and slots. `program` says why an interrupt loses no value, and `threads` what
other threads read meanwhile.

The gradient seam. Inside a replica, `Optimizer.apply` first hands the gradients to the
replica context: sum over replicas in `run`, mean in `fit`. Clipping, accumulation and
weight averages come after it.

Deferred updates (`variables`). Where variables do not live on the replicas' devices,
the strategy's home makes the updates after the program, each a program of its own.

Sharded updates (`step`). Where replicas divide the update (ZeRO), the seam
reduce-scatters the gradients, and the replicas' part of the program ends. The update is
made after it on arrays that are laid out in blocks, and XLA's partitioner divides it.
A step that uses the new values itself, as a GAN's does, makes the whole update inside.

Rematerialisation (`blocks`). Of a fully sharded model no layer's whole weights are kept
from the forward to the backward pass.

Layouts (`layouts`). One rule gives each variable its sharding between steps. The second
mesh axis of a model parallel strategy is left to XLA's partitioner
(`shard_map(axis_names=...)`). Several replicas on a device are a `vmap` inside it.

Gradient tapes (`replay`). `tape.gradient` traces the step again up to that same call,
and differentiates that.

The divergence pass. Before a program runs first, one pass over its jaxpr marks what may
differ between replicas; collectives over all replicas wash the mark off. A mirrored
variable that would get a marked value is an error with its name.

Seeds. The replica's index is folded into each seed generator's seed on the way in and
taken out on the way out, so masks differ between replicas and the state stays mirrored.

Composite arrays. A sparse or quantised array is one array to its user and a pytree node
to JAX; each replica's part becomes such an array again, padded to equal sizes.
"""

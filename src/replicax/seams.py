"""Names for `replicax-estimator` and `replicax-migrate`, beside the public names.

Both may also use these attributes of a strategy: `input_context`, `workers.count`,
`workers.exchange` and, where servers hold the variables, `home.begin()`, which fetches
newer values, and `home.settle()`, which waits for the servers.
"""

# `current_scope` returns the `keras.StatelessScope` of a trace. `set_value` sets a
# variable's value or initial value.
from replicax._private.keras import current_scope as current_scope
from replicax._private.keras import set_value as set_value

# Raises unless a value is a path in a mounted file system.
from replicax._util.arguments import require_path as require_path

# Replaces the devices of all strategies, also those that a script names.
from replicax._util.stand_ins import using_devices as using_devices

# `storage` writes and reads checkpoints. `CheckpointWatch` polls for new ones.
from replicax.checkpoint import storage as storage
from replicax.checkpoint.evaluation import CheckpointWatch as CheckpointWatch

# Makes the random states of all workers equal.
from replicax.engine.checks.consistency import (
    synchronize_random_state as synchronize_random_state,
)

# Yields the batches of any dataset, also of strings.
from replicax.input.sources import raw_batches as raw_batches

# In their contexts, `made_alike` gives new objects the same names and seeds each time,
# and `reusing` calls a function with each new variable.
from replicax.keras.variables import made_alike as made_alike
from replicax.keras.variables import reusing as reusing

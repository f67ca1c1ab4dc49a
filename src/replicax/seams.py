"""Names for `replicax-estimator` and `replicax-migrate`, beside the public names.

Both may also use these attributes of a strategy: `input_context`, `workers.count`,
`workers.exchange` and, where servers hold the variables, `home.begin()`, which fetches
newer values, and `home.settle()`, which waits for the servers.
"""

# Raises unless a value is a path in a mounted file system.
# The `keras.StatelessScope` of a trace; sets a variable's value or initial value.
from replicax._private.keras import current_scope as current_scope
from replicax._private.keras import set_value as set_value
from replicax._util.arguments import require_path as require_path

# Replaces the devices of all strategies, also those that a script names.
from replicax._util.stand_ins import using_devices as using_devices

# Writes and reads a checkpoint's folder; polls a folder for new checkpoints.
from replicax.checkpoint import storage as storage
from replicax.checkpoint.evaluation import CheckpointWatch as CheckpointWatch

# Gives all workers the random state of the first.
from replicax.engine.checks.consistency import (
    synchronize_random_state as synchronize_random_state,
)

# Yields the batches of any dataset, also of strings; makes objects again with the same
# names and seeds; reports the variables that a function creates.
from replicax.input.sources import raw_batches as raw_batches
from replicax.keras.variables import made_alike as made_alike
from replicax.keras.variables import reusing as reusing

"""What a distribution that builds on replicax may use beside the public names.

Of a strategy also `input_context`, `workers.count` and `workers.exchange`; and, where
servers hold variables, `home.begin()` (fetch newer values), `home.settle()` (wait).
"""

# The `keras.StatelessScope` of a trace; sets a variable's value or initial value.
from replicax._private.keras import current_scope as current_scope
from replicax._private.keras import set_value as set_value

# All strategies use these devices, whichever a script names.
from replicax._util.stand_ins import using_devices as using_devices

# Files of arrays and JSON values, with checksums; polls a folder for new checkpoints.
from replicax.checkpoint import storage as storage
from replicax.checkpoint.evaluation import CheckpointWatch as CheckpointWatch

# Gives all workers the random state of the first.
from replicax.engine.checks.consistency import (
    synchronize_random_state as synchronize_random_state,
)

# Reads any dataset, with strings; repeats names and seeds; reports created variables.
from replicax.input.sources import raw_batches as raw_batches
from replicax.keras.variables import made_alike as made_alike
from replicax.keras.variables import reusing as reusing

"""Porting of `tf.distribute` scripts: `replicax migrate`.

Needs LibCST: `pip install 'replicax[migrate]'`.
"""

from replicax.migrate.port import Ported, port
from replicax.migrate.script import Finding

__all__ = ["Finding", "Ported", "port"]

"""`tf.estimator`'s API, which the distribution `replicax-estimator` brings."""

from replicax.errors import names_distribution

with names_distribution("replicax-estimator"):
    from replicax_estimator import *  # noqa: F403
    from replicax_estimator import __all__ as __all__

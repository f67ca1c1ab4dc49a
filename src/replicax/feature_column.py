"""Feature columns: transform raw features into the inputs of a model."""

from replicax.estimator.absent import getter_of_absent
from replicax.estimator.feature_column import *  # noqa: F403
from replicax.estimator.feature_column import __all__  # noqa: F401

__getattr__ = getter_of_absent("rx.feature_column")

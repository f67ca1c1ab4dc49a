"""Feature columns: how raw features become input of a model."""

from replicax.estimator.feature_column import *  # noqa: F403
from replicax.estimator.feature_column import __all__  # noqa: F401

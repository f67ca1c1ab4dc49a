"""Serving signatures under their names in TF (`tf.estimator.export`)."""

from replicax.estimator.absent import getter_of_absent
from replicax.estimator.receivers import (
    ServingInputReceiver,
    build_raw_serving_input_receiver_fn,
)

__all__ = ["ServingInputReceiver", "build_raw_serving_input_receiver_fn"]

__getattr__ = getter_of_absent("rx.estimator.export")

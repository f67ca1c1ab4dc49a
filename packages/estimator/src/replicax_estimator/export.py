"""Serving signatures under their names in TF (`tf.estimator.export`)."""

from replicax_estimator.receivers import (
    ServingInputReceiver,
    build_raw_serving_input_receiver_fn,
)

__all__ = ["ServingInputReceiver", "build_raw_serving_input_receiver_fn"]

"""The engine: a replica function becomes one XLA program.

`program` is the entry: it discovers a function's variables, compiles one program and
writes the variables back. It knows Keras' variables and scopes, no models or data.

Variables of aggregation `"sum"`, as metrics have, are split on the way in and summed on
the way out, so a step may add to, reset, read or decay its share. All shares but the
first are rounded to fewer bits, so that adding them up is exact.

`Optimizer.apply` first hands the gradients to the replica context, which sums them over
the replicas in `run` and averages them in `fit`.

An update that replicas divide between them (ZeRO) is made after the replicas' part of
the program, and XLA's partitioner divides it. A step that uses the new values itself,
as a GAN's does, makes the whole update inside.

The replica's index is folded into each seed generator's seed on the way in and taken
out on the way out, so masks differ between replicas and the state stays mirrored.
"""

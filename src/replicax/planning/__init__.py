"""Estimates of a training step on other hardware, for `replicax plan` and `rx.plan`.

A strategy can use described devices, which this machine does not have. Its variables
stay on this machine. The strategy traces and compiles programs for the described mesh,
runs none, and the estimate reads the compiled program.

`topology` turns a name such as `"v5e:16x16"` into described devices and their rates
(`rates`, `cards`). `capture` stops a script at its training step, and `analysis`
compiles the step with the compiler that `compiler` finds. `hlo` parses the result,
`hlo_summary` counts its collectives, `schedule` times a GPU's kernels in their order,
and `work` the rest by a roofline model (`roofline`). `report` shows the result.

`strategies.dry_run` drives the strategies. No other folder imports this folder.
"""

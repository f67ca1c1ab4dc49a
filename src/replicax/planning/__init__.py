"""Plans: what a training step would do on other hardware: `replicax plan`, `rx.plan`.

Strategies take devices that are only described. Variables stay on this machine,
programs are traced and compiled for the described mesh, and handed to the plan in place
of being run; the plan reads the compiled program.

The way through. `topology` turns a name such as `"v5e:16x16"` into described devices
and their rates (`rates`, `cards`). `capture` takes the training step, and `analysis`
compiles it with the compiler that `compiler` finds. `hlo` parses the compiled text,
`hlo_summary` counts its collectives, `schedule` times a GPU's kernels in their order,
and `work` the rest by a roofline model (`roofline`). `report` has the result.

A satellite: it uses strategies by their dry run (`_util.dry_run`), and no other folder
imports it.
"""

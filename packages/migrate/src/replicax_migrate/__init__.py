"""Ports `tf.distribute` scripts by rewriting their syntax trees: `replicax migrate`.

One script. `port` parses the text into a `Script` (`script`): the syntax tree of
LibCST with resolved names (`names`), reaching definitions (`flow`, `origins`) and the
findings. Planners run first. Each looks at the whole script and plans what is ported
together or not at all, such as a pipeline (`pipelines`), sessions (`sessions`), losses
of probabilities (`logits`, `last_layers`), names of outputs (`outputs`) or training
steps (`training`). Then `rewrite` visits the tree once, and replaces each node by its
plan, by a rewrite rule or by the tables. `imports` comes last.

Notebooks. `notebooks` makes one script of a notebook's code cells, and splits its port.

Tables and rules. `tables.toml` has the data: names whose parameters correspond one by
one, keywords, texts of calls, lists of names, and what reports say. A rule (`rules`)
ports a call that needs more than a row: those in `calls`, `arrays`, `host`,
`keras_calls`, `optimizer_calls`, `compile_calls`, `methods` and `sources`. `members`
ports attributes, and `layer_names` names with slashes. A rule raises `Unported` where
it is not sure: the expression stays unchanged, and a comment above the statement gives
the reason.

The check. `check` runs `first_step` in a process of its own, which executes the ported
script up to its first training step.
"""

from replicax_migrate.notebooks import port_notebook
from replicax_migrate.port import Ported, port
from replicax_migrate.script import Finding

__all__ = ["Finding", "Ported", "port", "port_notebook"]

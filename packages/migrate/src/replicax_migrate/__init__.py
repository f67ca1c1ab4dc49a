"""Ports `tf.distribute` scripts by rewriting their syntax trees: `replicax migrate`.

`x = tf.reduce_sum(y)` becomes `x = keras.ops.sum(y)`. `port` does this in three steps:

1. It parses the text into a `Script` (`script`): the syntax tree of LibCST, the imports
   behind each name (`names`), and the values of variables (`flow`, `values`, `kinds`).
2. Analysis passes, the functions `plan_*`, look at the whole script. They port nodes
   that depend on each other together or not at all: the nodes of a `tf.data` pipeline,
   of a session, of a model with its loss. Each pass returns `Edits` (`edits`).
3. `rewrite` visits the tree once. It replaces each node by its edit, by a rule, or by a
   row of the tables. `imports` replaces the imports last.

These words have one meaning everywhere:

- path: a name of TensorFlow without `tf.`, such as `"math.reduce_sum"`.
- target: what a path becomes, such as `"keras.ops.sum"`. `tables.toml` has the targets.
- rule: a function that ports a call or an attribute for which a row is not enough. It
  raises `Unported` if it is not sure; the node then stays, below a comment, its mark.
- finding: a line of the report. It reports code that is *left* to port by hand, or it
  is a *note*: how the port behaves differently.
- host function: a function that an input pipeline maps, and that runs on NumPy arrays.

`notebooks` joins the cells of a notebook to one script. `check` executes a ported
script up to its first training step, in a process of its own (`first_step`).
"""

from replicax_migrate.notebooks import port_notebook
from replicax_migrate.port import Ported, port
from replicax_migrate.script import Finding

__all__ = ["Finding", "Ported", "port", "port_notebook"]

"""Porting of `tf.distribute` scripts: `replicax migrate`.

One script. `port` parses the text to a `Script` (`script`): a syntax tree of LibCST
with the names in it (`names`), the definitions that reach each use (`flow`, `origins`),
and the findings so far. Plans come first: each looks at the whole script and decides
what is ported together or not at all, such as a pipeline (`pipelines`), sessions
(`sessions`), losses of probabilities (`logits`) or training steps (`training`). Then
`rewrite` visits the tree once, and ports each node as planned, or by a rule, or by the
tables. `imports` comes last.

Tables and rules. `tables.toml` maps names whose arguments are alike; a rule is a
function of a call that takes more than that (`calls`, `keras_calls`, `layer_calls`,
`host_calls`, `legacy`, `methods`, `members`). A rule raises `Unported` where it is not
sure: the expression stays as it is, and the statement gets a mark with the reason.

The check. `check` runs the ported script in a process of its own up to its first
training step, under the dry run of `replicax plan`.

This folder reads texts and writes texts. It imports nothing of the library but the
tables' targets, to see whether they exist, and needs LibCST:
`pip install 'replicax[migrate]'`.
"""

from replicax.migrate.port import Ported, port
from replicax.migrate.script import Finding

__all__ = ["Finding", "Ported", "port"]

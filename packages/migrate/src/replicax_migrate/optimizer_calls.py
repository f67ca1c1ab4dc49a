"""Ports calls of the classes of optimizers."""

import libcst as cst

from replicax_migrate.rules import CallSite, as_float, with_keywords
from replicax_migrate.tree import argument, changed, named, value_of

__all__ = ["optimizer_arguments"]


def optimizer_arguments(site: CallSite) -> list[cst.Arg]:
    """Port the arguments of a call of an optimizer class to Keras 3.

    Raises:
        Unported: If one of them has no counterpart.
    """
    args = with_keywords(site, "optimizer")
    before = value_of(site.node, 0, "learning_rate") or named(site.node, "lr")
    after = argument(args, 0, "learning_rate")
    if before is not None and after is not None:
        args = changed(args, after, as_float(site, before, after.value))
    return args

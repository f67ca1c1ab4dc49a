"""Ports calls of the classes of optimizers."""

import libcst as cst

from replicax_migrate.rules import CallSite, as_float, port_keywords
from replicax_migrate.tree import arg_value, find_arg, kwarg_value, with_new_value

__all__ = ["optimizer_arguments"]


def optimizer_arguments(site: CallSite) -> list[cst.Arg]:
    """Port the arguments of a call of an optimizer class to Keras 3.

    Raises:
        Unported: If one of them has no counterpart.
    """
    args = port_keywords(site, "optimizer")
    before = arg_value(site.node, 0, "learning_rate") or kwarg_value(site.node, "lr")
    after = find_arg(args, 0, "learning_rate")
    if before is not None and after is not None:
        args = with_new_value(args, after, as_float(site, before, after.value))
    return args

"""Names of columns as names of variables."""

import re

__all__ = ["variable_name"]


def variable_name(name: str) -> str:
    """A column's name with `_` for what Keras refuses in the name of a layer.

    Example:
        >>> variable_name("user/age_bucketized")
        'user_age_bucketized'
    """
    return re.sub(r"[^\w.\-]", "_", name)

"""Docstrings of the package as the API pages take them."""

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)


class Examples(griffe.Extension):
    """Reads the section `Example:` as what it is: a sample with its output."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section to the only name that is known."""
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub("Examples:", obj.docstring.value)

"""Arguments of tf.estimator that are not here, with what to use instead."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

__all__ = ["refuses"]

_Called = TypeVar("_Called", bound=Callable[..., Any])


def refuses(caller: str, **instead: str) -> Callable[[_Called], _Called]:
    """Decorate a function or class: arguments of TF raise an error that says more.

    It does not change the signature. `instead` says for each argument what to use. A
    value that asks for nothing, such as None or False, is accepted.

    Raises:
        TypeError: In a call: if such an argument is given.
    """

    def decorate(called: _Called) -> _Called:
        is_class = inspect.isclass(called)
        # A class stays itself: it gets another `__init__`.
        fn = vars(called)["__init__"] if is_class else called

        @functools.wraps(fn)
        def checked(*args: Any, **kwargs: Any) -> Any:
            for name in instead.keys() & kwargs.keys():
                if value := kwargs.pop(name):
                    raise TypeError(
                        f"{caller}: there is no argument {name!r}, got {value!r}. "
                        f"{instead[name]}"
                    )
            return fn(*args, **kwargs)

        if not is_class:
            return cast(_Called, checked)
        setattr(called, "__init__", checked)  # noqa: B010 - no attribute of `_Called`.
        return cast(_Called, called)

    return decorate

"""The fixtures of the core's tests, and what they set up for the whole run."""

from tests.conftest import (  # noqa: F401
    collections_stay_small,
    data_dir,
    digits,
    leaves_nothing_behind,
    mounted,
)

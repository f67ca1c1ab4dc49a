"""The fixtures and the setup of the core's tests."""

from tests.conftest import (  # noqa: F401
    collections_stay_small,
    data_dir,
    digits,
    leaves_nothing_behind,
    mounted,
)

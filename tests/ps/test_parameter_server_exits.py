"""A chief whose script ends early: the others hear of it, and do not wait for it."""

import pytest
from tests.ps.jobs import Job, make

pytest.importorskip("pyarrow")
pytestmark = pytest.mark.multiprocess


@pytest.mark.slow
def test_an_exit_code_of_the_chiefs_script_ends_the_job(tmp_path):
    env = {"FAILING": "worker:0", "EXIT_CODE": "3"}
    with Job(tmp_path, options={}, hook="fail", env=env) as cluster:
        results = cluster.ended(45)
    assert results.exit_codes == {"worker:0": 3, "worker:1": 138, "ps:0": 1, "ps:1": 1}
    for name in ("worker:1", "ps:0", "ps:1"):
        assert "worker:0 (the chief) failed: SystemExit: 3" in results[name].output


def leave_early(options):
    """The chief's script is over where the others still wait for its word."""
    strategy = make(options)
    if not strategy.is_chief:
        strategy.session.get("a word", "its word")


@pytest.mark.slow
def test_a_chief_whose_script_has_ended_is_not_waited_for(tmp_path):
    options = {"timeouts": {"step": 600}}
    with Job(tmp_path, leave_early, options=options) as cluster:
        results = cluster.ended(45)
    assert results.exit_codes == {"worker:0": 0, "worker:1": 138, "ps:0": 0, "ps:1": 0}
    assert "has ended its script, and did not come to its word" in (
        results["worker:1"].output
    )

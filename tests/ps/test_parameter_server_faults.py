"""Tasks of a job with parameter servers that are killed, frozen, or fail."""

import signal

import pytest
from tests.ps.jobs import Job, check_counts, make

pytest.importorskip("pyarrow")
pytestmark = pytest.mark.multiprocess


@pytest.mark.slow
def test_a_worker_that_does_not_come_back_ends_nothing(tmp_path):
    with Job(tmp_path, options={}, epochs=500) as cluster:
        cluster.wait_for_step("worker:1", 25)
        cluster.kill("worker:1")
        cluster.wait_for_progress("worker:0", steps=60)
        results = cluster.end()
    assert results.exit_codes == {
        "worker:0": 0,
        "worker:1": -signal.SIGKILL,
        "ps:0": 0,
        "ps:1": 0,
    }
    assert results["worker:0"].value["accuracy"] > 0.9


@pytest.mark.slow
def test_without_its_chief_a_job_fails_when_the_grace_period_is_over(tmp_path):
    with Job(tmp_path, options={"timeouts": {"chief": 5}}, epochs=500) as cluster:
        cluster.wait_for_step("worker:0", 5)
        cluster.wait_for_step("worker:1", 5)
        cluster.kill("worker:0")
        results = cluster.ended(25)
    assert results.exit_codes == {
        "worker:0": -signal.SIGKILL,
        "worker:1": 138,
        "ps:0": 1,
        "ps:1": 1,
    }
    for name in ("worker:1", "ps:0", "ps:1"):
        assert "worker:0 (the chief) died and did not return" in results[name].output


@pytest.mark.slow
@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("server", [0, 1])
def test_without_snapshots_a_killed_server_ends_the_job(tmp_path, server, restarted):
    options = {"timeouts": {"server": 40 if restarted else 8}}
    with Job(tmp_path, options=options, epochs=500) as cluster:
        cluster.wait_for_step("worker:0", 5)
        cluster.wait_for_step("worker:1", 5)
        cluster.kill(f"ps:{server}")
        if restarted:
            cluster.restart(f"ps:{server}")
        results = cluster.ended(40)
    codes = results.exit_codes
    if not restarted:
        assert codes.pop(f"ps:{server}") == -signal.SIGKILL
    assert codes.pop("worker:0") == codes.pop("worker:1") == 138
    assert set(codes.values()) == {1}, results["ps:0"].output
    advice = "snapshot_dir" if restarted else "See its log"
    for name in ("worker:0", "worker:1"):
        output = results[name].output
        assert f"ps:{server}" in output.splitlines()[-1], output
        assert advice in output, output


@pytest.mark.slow
def test_an_error_in_a_workers_script_ends_only_that_worker(tmp_path):
    env = {"FAILING": "worker:1"}
    with Job(tmp_path, options={}, hook="fail", env=env) as cluster:
        assert cluster.task("worker:1").wait(timeout_seconds=45) == 1
        cluster.wait_for_progress("worker:0", steps=10)
        results = cluster.end()
    assert results.exit_codes == {"worker:0": 0, "worker:1": 1, "ps:0": 0, "ps:1": 0}
    assert results["worker:0"].value["accuracy"] > 0.9
    check_counts(results["worker:0"].value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "code", "error"),
    [
        ({}, 1, "ArithmeticError: a mistake in the script"),
        ({"EXIT_CODE": "3"}, 3, "worker:0 (the chief) failed: SystemExit: 3"),
    ],
)
def test_an_error_or_exit_in_the_chiefs_script_ends_the_job(tmp_path, env, code, error):
    env = {"FAILING": "worker:0", **env}
    with Job(tmp_path, options={}, hook="fail", env=env) as cluster:
        results = cluster.ended(45)
    assert results.exit_codes == {
        "worker:0": code,
        "worker:1": 138,
        "ps:0": 1,
        "ps:1": 1,
    }
    for name in ("worker:1", "ps:0", "ps:1"):
        assert error in results[name].output


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

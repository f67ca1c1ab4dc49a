"""`ClusterCoordinator`: the chief schedules functions, free workers run them."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence

import jax

from replicax._util.random_state import RandomStream
from replicax._util.types import JSON, JSONObject, PyTree
from replicax._util.waiting import wait_for
from replicax.errors import ClusterMismatchError, ContextError
from replicax.input import InputContext
from replicax.ps.closure_calls import (
    NOT_DONE,
    ClosureOwner,
    ClosureWorker,
    ScriptSync,
)
from replicax.ps.closure_variables import ClosureVariables, GroupRequests
from replicax.ps.closures import Scheduled
from replicax.ps.payloads import (
    FunctionNames,
    PerWorkerSources,
    PerWorkerValues,
    RemoteValue,
    dataset_maker,
    decode,
    error_from_json,
    error_of,
    require_size,
)
from replicax.ps.session import Session
from replicax.ps.strategy import ParameterServerStrategy
from replicax.ps.worker_input import ElasticInputShard

__all__ = ["ClusterCoordinator", "RemoteValue"]

_PACE_SECONDS = 0.05
_logger = logging.getLogger("replicax")


class ClusterCoordinator:
    """Schedules functions, which run on whichever worker is free.

    The script is the same in every task and makes the same calls. The chief schedules
    functions and waits in `join`, `done` and `fetch`; in these calls the other workers
    run the functions, one at a time. The calls return or raise the same in every task,
    so loops and branches that depend on them agree. A chief that is the only worker
    runs the functions itself. (TF:
    `tf.distribute.experimental.coordinator.ClusterCoordinator`.)

    Args:
        strategy: The strategy under which the model is built. A second call for the
            same strategy returns the same coordinator.

    Raises:
        TypeError: If `strategy` is not a `ParameterServerStrategy`.
        ContextError: In an evaluator.

    Example:
        >>> import replicax as rx
        >>> strategy = rx.ParameterServerStrategy()  # doctest: +SKIP
        >>> coordinator = rx.ClusterCoordinator(strategy)  # doctest: +SKIP
    """

    def __new__(cls, strategy: ParameterServerStrategy) -> "ClusterCoordinator":
        """Return the strategy's coordinator, or a new one if it has none."""
        existing = getattr(strategy, "coordinator", None)
        return super().__new__(cls) if existing is None else existing

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        session = _checked(strategy)
        if strategy.coordinator is self:
            return
        self.strategy = strategy
        assert isinstance(strategy.input_shard, ElasticInputShard)
        strategy.input_shard.read_in_closures()
        self._session: Session = session
        self._functions = FunctionNames()
        self._sources = PerWorkerSources()
        remote, labels = strategy.servers.remote, strategy.servers.labels
        random_numbers = RandomStream(f"{session.name} {session.starts}")
        self._variables = ClosureVariables(remote, labels)
        self._requests = GroupRequests(session, labels, remote)
        remote.requests = self._requests
        self._script_sync = ScriptSync(session)
        self._owner = ClosureOwner(session)
        self._worker = ClosureWorker(
            strategy,
            self._functions,
            self._variables,
            self._script_sync,
            self._sources,
            random_numbers,
        )
        strategy.coordinator = self

    def schedule(
        self,
        fn: Callable[..., PyTree],
        args: Sequence[PyTree] | None = None,
        kwargs: Mapping[str, PyTree] | None = None,
    ) -> RemoteValue:
        """Queue a function for the next free worker, without waiting.

        If a worker dies, its function is retried on another worker. Variable updates
        of the first attempt stay, and the retry does not apply them again.

        Args:
            fn: The function. It must be the same in all tasks, and may use the script's
                objects: the strategy, models, optimizers, metrics.
            args: Its arguments: numbers, texts, arrays, and lists, tuples and dicts of
                them, at most 3 MiB. For a per-worker value the function gets the value
                of its worker, for a `RemoteValue` the result.
            kwargs: Keyword arguments, likewise.

        Returns:
            A handle of the result.

        Raises:
            Exception: The error of an earlier function, which has cancelled the queued
                functions. It is raised once.
            TypeError: For an argument that cannot be sent.
        """
        self._require_outside("schedule")
        name = self._functions.register(fn)
        if not self._session.is_chief:
            # A loop that only schedules must end when the job has failed, too.
            self._session.require_no_failure()
            return RemoteValue(self.fetch)
        self.strategy.servers.publish()
        call, needs = self._owner.pack(args or (), kwargs or {})
        id = f"{self._session.id} {next(self._owner.numbers)}"
        result = RemoteValue(self.fetch, id)
        payload = {"call": call, "passed": self._script_sync.passed}
        ids = [need.id for need in needs]

        def poll() -> Scheduled | None:
            answer: Scheduled = self._session.once(
                "schedule", id=result.id, payload=payload, function=name, needs=ids
            )
            if not answer.is_full:
                return answer
            self._tend()
            return None

        scheduled = self._script_sync.until(poll, "a place in the queue")
        if scheduled.failed is not None:
            self._publish("schedule", scheduled.failed)
        self._owner.add(result, needs)
        return result

    def join(self) -> None:
        """Wait until all scheduled functions have run.

        Afterwards variables and metrics have the newest values in all tasks.

        Raises:
            Exception: The first error of a function, which has cancelled the queued
                functions. It has the same type if that is a builtin exception, else it
                is a `ClosureError`. Its notes have the traceback.
            ClusterError: If no function makes progress for `timeouts.step` seconds.
            NotImplementedError: If functions have trained a variable with two
                optimizers since the last `join`.
        """
        self._require_outside("join")
        if not self._session.is_chief:
            self._follow("join")
            return
        self._script_sync.until(self._poll_finished, "the end of all closures")
        self._publish_round("join")

    def done(self) -> bool:
        """Whether all scheduled functions have run.

        In tasks other than the chief, this runs functions until the chief's result of
        the same call is known. So `while not coordinator.done():` works; keep its body
        short, because all tasks run it.

        Raises:
            Exception: As `join`.
        """
        self._require_outside("done")
        if not self._session.is_chief:
            return self._follow("done").get("done", False)
        is_over = wait_for(
            lambda: self._poll_finished() or None, _PACE_SECONDS, late=lambda: False
        )
        if is_over:
            self._publish_round("done")
        else:
            self._script_sync.publish(NOT_DONE)
        return is_over

    def fetch(self, val: PyTree) -> PyTree:
        """Wait for results.

        Args:
            val: A `RemoteValue`, or lists, tuples and dicts of `RemoteValue`s.

        Returns:
            The same structure with the results, at most 3 MiB in all, as NumPy arrays.

        Raises:
            Exception: The error of one of the functions. The next `join` also raises
                this error.
        """
        self._require_outside("fetch")
        leaves, structure = jax.tree.flatten(
            val, is_leaf=lambda x: isinstance(x, RemoteValue)
        )
        handles = [x for x in leaves if isinstance(x, RemoteValue)]
        if self._session.is_chief:
            values = self._fetch(handles)
        else:
            values = self._follow("fetch")["values"]
        if len(values) != len(handles):
            raise ClusterMismatchError(
                f"{self._session.name}: coordinator.fetch: {len(handles)} results are "
                f"fetched here and {len(values)} on the chief. All tasks must run the "
                "same script."
            )
        results = iter(values)
        return structure.unflatten(
            decode(next(results)) if isinstance(x, RemoteValue) else x for x in leaves
        )

    def create_per_worker_dataset(self, dataset_fn: PyTree) -> PerWorkerValues:
        """Create a dataset on each worker.

        Args:
            dataset_fn: A function that returns a dataset: any iterable, such as a
                result of `strategy.experimental_distribute_dataset`. Each worker calls
                it when a scheduled function first needs the dataset, and again after a
                restart. If it has a parameter, it gets an `rx.InputContext` with the
                number of workers that run functions, and this worker's index.
                `dataset_fn` may also be a dataset, which each worker uses unchanged.

        Returns:
            The datasets. Pass `iter` of the result to `schedule` as an argument; the
            function gets its worker's own iterator. Datasets should repeat: at the end,
            `next` raises `StopIteration`, and the function fails.
        """
        return PerWorkerValues(
            self._sources,
            dataset_maker(dataset_fn, self._input_context),
            f"dataset {getattr(dataset_fn, '__name__', type(dataset_fn).__name__)}",
        )

    def _input_context(self) -> InputContext:
        shard = self.strategy.input_shard.of_loop
        return InputContext(
            num_input_pipelines=shard.num_workers,
            input_pipeline_id=shard.worker,
            num_replicas_in_sync=self.strategy.num_replicas_in_sync,
        )

    def _require_outside(self, name: str) -> None:
        if self.strategy.servers.in_closure:
            raise ContextError(
                f"ClusterCoordinator.{name}: called in a function that the coordinator "
                "runs. Only the script itself schedules and waits."
            )

    # The chief.

    def _tend(self) -> None:
        """Do the chief's work of one poll."""
        self._requests.adopt()
        self._variables.add(self._owner.collect())
        if len(self._session.workers) == 1:
            end = time.monotonic() + _PACE_SECONDS
            while self._worker.run_one() and time.monotonic() < end:
                pass
        self._script_sync.poll_pending()
        if self._owner.unknown:
            self._script_sync.require_workers()

    def _poll_finished(self) -> bool:
        """Do the work of one poll; return whether all closures are finished."""
        self._tend()
        return not self._owner.unknown

    def _publish_round(self, method: str) -> None:
        """After all closures: publish the outcome; raise the first error, if any."""
        error = self._session.once("raise_if_failed")
        self.strategy.servers.refresh()
        twice = self.strategy.servers.remote.trained_twice()
        # A chief without workers has the values of both optimizers.
        is_alone = len(self._session.workers) == 1
        if error is None and twice is not None and not is_alone:
            error = error_of("NotImplementedError", twice)
        done = {"done": True} if method == "done" else {}
        self._publish(method, error, sums=self._variables.values(), **done)

    def _publish(
        self, method: str, error: dict[str, str] | None, **record: JSON
    ) -> None:
        """Publish the outcome of a call; raise its error."""
        self._script_sync.publish({"method": method, "error": error, **record})
        if error is not None:
            raise error_from_json(error)

    def _fetch(self, handles: Sequence[RemoteValue]) -> list[JSON]:
        def are_known() -> bool | None:
            if all(x.outcome is not None for x in handles):
                return True
            self._tend()
            return None

        self._script_sync.until(
            are_known, "the end of the closures whose results are fetched"
        )
        outcomes = [x.outcome for x in handles if x.outcome is not None]
        values = [outcome.value for outcome in outcomes]
        error = next((x.error for x in outcomes if x.error is not None), None)
        try:
            if error is None:
                require_size(values, "fetch: all results together")
        except ValueError as too_large:
            error = error_of("ValueError", str(too_large))
        self._publish("fetch", error, **({"values": values} if error is None else {}))
        return values

    # The other workers.

    def _follow(self, method: str) -> JSONObject:
        """Run closures until the chief's outcome of this call is known; return it."""

        def poll() -> JSONObject | None:
            record = self._script_sync.pass_next()
            if record is None:
                self._run_one()
            return record

        # Iterators' threads may draw random numbers between closures, too.
        with self._worker.random_numbers:
            record = self._script_sync.until(poll, f"coordinator.{method}")
        if "sums" in record:
            self._requests.adopt()
            self._variables.assign(record["sums"])
            self.strategy.servers.refresh()
        if record.get("error") is not None:
            raise error_from_json(record["error"])
        called = record.get("method", method)
        if called != method:
            raise ClusterMismatchError(
                f"{self._session.name}: the chief called coordinator.{called} "
                f"where this task calls coordinator.{method}. All tasks must run the "
                "same script, with branches that depend only on the coordinator's "
                "results."
            )
        if method == "fetch" and "values" not in record:
            _logger.warning(
                "%s ends: it was restarted, and cannot repeat the script: results that "
                "the chief has fetched are no longer kept.",
                self._session.name,
            )
            raise SystemExit(0)
        return record

    def _run_one(self) -> None:
        if self._worker.run_one():
            self._script_sync.has_moved = True
        elif self._session.begin_rare_check():
            chief = self._session.workers[0]
            if self._session.board("have_left", workers=[chief]):
                _logger.warning(
                    "%s ends: the chief's script has ended without reaching this call.",
                    self._session.name,
                )
                raise SystemExit(0)
            self._script_sync.poll_pending()


def _checked(strategy: object) -> Session:
    if not isinstance(strategy, ParameterServerStrategy):
        raise TypeError(
            "ClusterCoordinator: strategy must be a ParameterServerStrategy; got "
            f"{strategy!r}."
        )
    if strategy.session is None:
        raise ContextError(
            "ClusterCoordinator: this is an evaluator, which neither runs nor "
            "schedules functions. Create a coordinator on chief and workers only."
        )
    return strategy.session

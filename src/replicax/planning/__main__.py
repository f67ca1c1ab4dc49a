"""`python -m replicax.planning`: runs one script up to its training step; plans it.

The process is made for it: JAX is to see no accelerators where they are described.
"""

import argparse
import sys

from replicax.engine.devices import set_logical_devices
from replicax.planning.analysis import analyse
from replicax.planning.capture import NoTrainingStepError, capture_script
from replicax.planning.topology import find_topology, num_cpu_devices


def main() -> None:
    """Plan the script that the command line names, and print the plan."""
    parser = argparse.ArgumentParser(prog="replicax plan")
    parser.add_argument("--topology", required=True)
    parser.add_argument("--slices", type=int, default=1)
    parser.add_argument("--link-bandwidth", type=float, default=None)
    parser.add_argument("--network-bandwidth", type=float, default=None)
    parser.add_argument("--json", default=None)
    parser.add_argument("--figure", default=None)
    parser.add_argument("--module", action="store_true")
    parser.add_argument("--default-strategy", action="store_true")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    num_cpus = num_cpu_devices(given.topology)
    if num_cpus is not None:
        set_logical_devices(num_cpus)
    topology = find_topology(
        given.topology,
        given.slices,
        link_bandwidth=given.link_bandwidth,
        network_bandwidth=given.network_bandwidth,
    )
    try:
        capture = capture_script(
            given.script,
            given.arguments,
            topology,
            is_module=given.module,
            takes_default=given.default_strategy,
        )
    except NoTrainingStepError as error:
        sys.exit(f"Error: {error}")
    plan = analyse(capture, topology)
    plan.show()
    if given.json:
        plan.write_json(given.json)
    if given.figure and plan.time is not None:
        plan.write_figure(given.figure)
    elif given.figure:
        print(f"No figure: {plan.program} does not fit.", file=sys.stderr)


if __name__ == "__main__":
    main()

"""`python -m replicax.planning`: estimates the training step of one script.

`replicax plan` starts it as a process in which JAX uses no accelerator of this machine.
"""

import argparse
import sys

from replicax.engine.devices import set_logical_devices
from replicax.planning.analysis import analyse
from replicax.planning.capture import NoTrainingStepError, capture_script
from replicax.planning.topology import find_topology, num_cpu_devices


def main() -> None:
    """Estimate the step of the script that the command line names, and print it."""
    parser = argparse.ArgumentParser(prog="replicax plan")
    parser.add_argument("--topology", required=True)
    parser.add_argument("--slices", type=int, default=1)
    parser.add_argument("--link-bandwidth", type=float, default=None)
    parser.add_argument("--network-bandwidth", type=float, default=None)
    parser.add_argument("--json", default=None)
    parser.add_argument("--figure", default=None)
    parser.add_argument("--module", action="store_true")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    num_cpus = num_cpu_devices(options.topology)
    if num_cpus is not None:
        set_logical_devices(num_cpus)
    topology = find_topology(
        options.topology,
        options.slices,
        link_bandwidth=options.link_bandwidth,
        network_bandwidth=options.network_bandwidth,
    )
    try:
        capture = capture_script(
            options.script,
            options.arguments,
            topology,
            is_module=options.module,
        )
    except NoTrainingStepError as error:
        sys.exit(f"Error: {error}")
    plan = analyse(capture, topology)
    plan.show()
    if options.json:
        plan.write_json(options.json)
    if options.figure and plan.time is not None:
        plan.write_figure(options.figure)
    elif options.figure:
        print(f"No figure: {plan.program} does not fit.", file=sys.stderr)


if __name__ == "__main__":
    main()

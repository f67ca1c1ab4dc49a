"""`python -m replicax.planning`: estimates the training step of one script.

`replicax plan` starts it as a process in which JAX uses no accelerator of this machine.
"""

import json
import sys

from replicax.engine.devices import set_logical_devices
from replicax.planning.analysis import analyse
from replicax.planning.capture import NoTrainingStepError, capture_script
from replicax.planning.topology import find_topology, num_cpu_devices


def main() -> None:
    """Estimate the step of a script, and print it.

    The command line has the options of `replicax plan` as JSON, the script, and the
    script's arguments.
    """
    _, options_text, script, *arguments = sys.argv
    options = json.loads(options_text)
    num_cpus = num_cpu_devices(options["topology"])
    if num_cpus is not None:
        set_logical_devices(num_cpus)
    topology = find_topology(
        options["topology"],
        options["slices"],
        link_bandwidth=options["link_bandwidth"],
        network_bandwidth=options["network_bandwidth"],
    )
    try:
        capture = capture_script(
            script, arguments, topology, is_module=options["module"]
        )
    except NoTrainingStepError as error:
        sys.exit(f"Error: {error}")
    plan = analyse(capture, topology)
    plan.show()
    if options["json_file"]:
        plan.write_json(options["json_file"])
    if options["figure"] and plan.time is not None:
        plan.write_figure(options["figure"])
    elif options["figure"]:
        print(f"No figure: {plan.program} does not fit.", file=sys.stderr)


if __name__ == "__main__":
    main()

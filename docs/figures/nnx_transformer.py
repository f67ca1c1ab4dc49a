"""Draws `nnx_transformer.png`, the figure of `docs/your-own-jit.md`.

python docs/figures/nnx_transformer.py      # trains three times; a few minutes
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from matplotlib import pyplot as plt

EXAMPLE = Path(__file__).parents[2] / "examples" / "nnx_transformer.py"
STEPS, STOP = 120, 50


def losses(*arguments: str) -> tuple[list[int], list[float]]:
    """Run the example; return the steps that it prints, and their losses."""
    output = subprocess.run(
        [sys.executable, EXAMPLE, *arguments],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    print(*arguments, output, sep="\n", flush=True)
    pairs = re.findall(r"^step +(\d+)  loss ([\d.]+)$", output, re.MULTILINE)
    return [int(step) for step, _ in pairs], [float(loss) for _, loss in pairs]


def main() -> None:
    """Train without a stop, and with a stop between four devices and two."""
    with tempfile.TemporaryDirectory() as folder:
        first = losses("--replicas=4", f"--steps={STOP}", f"--checkpoint={folder}")
        second = losses("--replicas=2", f"--steps={STEPS}", f"--checkpoint={folder}")
    whole = losses("--replicas=4", f"--steps={STEPS}")
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    axes.plot(*whole, color="#b9c2cc", lw=6, label="4 devices, without a stop")
    axes.plot(*first, ".-", color="#2f6fab", label=f"4 devices, stopped at step {STOP}")
    axes.plot(*second, ".-", color="#d98b2b", label="continued on 2 devices")
    axes.set(xlabel="step", ylabel="training loss (nats a character)", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=150)


if __name__ == "__main__":
    main()

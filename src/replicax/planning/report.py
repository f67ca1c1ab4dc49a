"""The values of an estimate, as JSON, as tables in a terminal, and as a figure."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from replicax._util.units import binary_bytes, decimal, seconds
from replicax.planning.rates import Rates
from replicax.planning.roofline import StepTime

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["CollectiveUse", "Memory", "Plan", "Scale"]

_FORMAT = 1

_INK = "#1f2933"
_COLORS = {
    "compute": "#2f6fab",
    "memory traffic": "#d98b2b",
    "communication": "#b23a48",
    "step": "#52606d",
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes on one device.

    Attributes:
        arguments: Variables and the batch.
        outputs: Results and the new values of variables.
        aliased: Bytes of outputs that reuse the memory of arguments.
        temporaries: Bytes that the step needs only while it runs.
        code: Bytes of the program.
        capacity: Memory of the device; None: shared with others, or unknown.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int
    capacity: int | None

    @property
    def peak(self) -> int:
        """Bytes in use while the step runs: the sum of all parts."""
        sizes = (self.arguments, self.outputs, self.temporaries, self.code)
        return sum(sizes) - self.aliased


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveUse:
    """A kind of collective in a step, with its number and time.

    Attributes:
        kind: XLA's name, such as `"all-reduce"`.
        dtype: XLA's name of the element type.
        count: Number of these collectives in a step.
        bytes: Payload of one collective on one device.
        group_size: Number of devices in a group.
        num_groups: Number of groups that communicate at the same time.
        spans_hosts: Whether a group's devices are on several machines.
        num_slices: Number of slices that a group's devices are in.
        is_async: Whether the device computes while the collective runs.
        seconds: Time of all `count` collectives; None: unknown rates.
    """

    kind: str
    dtype: str
    count: float
    bytes: int
    group_size: int
    num_groups: int
    spans_hosts: bool
    num_slices: int
    is_async: bool
    seconds: float | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """The efficiency of a step on a number of devices.

    Attributes:
        num_devices: Number of devices.
        hardware: Shape of the devices, such as `"4x4"` chips of a slice.
        efficiency: Time of a step without exposed communication, divided by its whole
            time, with the same batch per device: in (0, 1].
    """

    num_devices: int
    hardware: str
    efficiency: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The estimate of a training step on some hardware, from `rx.plan`.

    The step was compiled, not run. FLOPs, bytes and collectives are counts of the
    compiled program; times come from a roofline model (docs/plan.md).

    Attributes:
        program: Name of the step.
        topology: Name of the hardware.
        device_kind: JAX's name of one device.
        num_devices: Number of devices that the step runs on.
        num_replicas: Number of replicas on these devices.
        num_hosts: Number of machines that hold the devices.
        num_slices: Number of TPU slices.
        rates: The rates of a device.
        fits: Whether the step fits into a device's memory.
        memory: Bytes on one device; None: unknown, or the compiler ran out of memory.
        flops: Multiplications and additions per device and step; None: see `memory`.
        bytes_accessed: Bytes that a device moves to and from its memory per step; None:
            see `memory`.
        collectives: The collectives of a step.
        time: Lower bound of a step's time; None: see `memory`.
        scaling: Efficiencies on 1, 2, 4, ... devices; empty: unknown.
        limit: What limits the step first: `"compute"`, `"memory bandwidth"`,
            `"interconnect"`, `"network"` or `"memory capacity"`.
        advice: How to change the step or the hardware.
        notes: Remarks, such as missing rates.
        assumptions: The assumptions of the time model, in short.
    """

    program: str
    topology: str
    device_kind: str
    num_devices: int
    num_replicas: int
    num_hosts: int
    num_slices: int
    rates: Rates
    fits: bool
    memory: Memory | None = None
    flops: float | None = None
    bytes_accessed: float | None = None
    collectives: tuple[CollectiveUse, ...] = ()
    time: StepTime | None = None
    scaling: tuple[Scale, ...] = ()
    limit: str
    advice: str
    notes: tuple[str, ...]
    assumptions: tuple[str, ...]

    def as_dict(self) -> dict[str, object]:
        """Convert the plan to JSON values, with the version of the format."""
        values = dataclasses.asdict(self)
        if self.memory is not None:
            values["memory"]["peak"] = self.memory.peak
        return {"format": _FORMAT, **values}

    def write_json(self, path: str | Path) -> None:
        """Write `as_dict` to a file."""
        text = json.dumps(self.as_dict(), indent=2)
        Path(path).write_text(text + "\n", encoding="utf-8")

    def write_figure(self, path: str | Path) -> None:
        """Draw time and scaling to a file, such as a PNG.

        Raises:
            ImportError: Without matplotlib.
            ValueError: If there is nothing to draw: the step does not fit.
        """
        if self.time is None:
            raise ValueError(
                f"plan: nothing to draw: {self.program} does not fit on "
                f"{self.topology}."
            )
        _draw(path, self, self.time)

    def show(self, console: Console | None = None) -> None:
        """Print the estimate as tables."""
        (console or Console()).print(self.__rich__())

    def __rich__(self) -> Group:
        parts: list[RenderableType] = [self._summary()]
        if self.collectives:
            parts.append(self._collective_table())
        parts.append(Text.assemble(("First limit: ", "bold"), f"{self.limit}. "))
        parts.append(Text(self.advice))
        parts += [Text(f"Note: {note}", style="yellow") for note in self.notes]
        parts.append(
            Text("Compiled, not run. " + " ".join(self.assumptions), style="dim")
        )
        return Group(*parts)

    def _summary(self) -> Table:
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="bold", no_wrap=True)
        rows.add_column(overflow="fold")
        hosts = "1 host" if self.num_hosts == 1 else f"{self.num_hosts} hosts"
        rows.add_row("step", Text(self.program))
        rows.add_row(
            "hardware",
            f"{self.topology}: {self.num_devices} x {self.device_kind} on {hosts}, "
            f"{self.num_replicas} replicas",
        )
        rows.add_row("rates", Text(self._rates()))
        if self.flops is not None and self.bytes_accessed is not None:
            rows.add_row("per device", f"{decimal(self.flops)}FLOP a step")
            rows.add_row("", f"{decimal(self.bytes_accessed)}B memory traffic a step")
        rows.add_row("memory", self._memory())
        if self.time is not None:
            rows.add_row("step time", Text(self._time()))
        if self.scaling:
            rows.add_row(
                "efficiency",
                "  ".join(f"{s.num_devices}: {s.efficiency:.1%}" for s in self.scaling)
                + " (devices: time on one / time on all, same batch on each)",
            )
        return rows

    def _rates(self) -> str:
        rates = self.rates
        float32 = rates.flops_by_type.get("f32")
        parts = [f"{decimal(rates.peak_flops)}FLOP/s"]
        if float32 is not None:
            parts.append(f"{decimal(float32)}FLOP/s in float32")
        parts.append(f"{decimal(rates.memory_bandwidth)}B/s of memory")
        if rates.ring_bandwidth is not None:
            parts.append(f"{decimal(rates.ring_bandwidth)}B/s in a ring")
        if rates.network_bandwidth is not None and self.time and self.time.network:
            parts.append(f"{decimal(rates.network_bandwidth)}B/s of network")
        return f"{', '.join(parts)}; {rates.source}"

    def _memory(self) -> Text:
        if self.memory is None:
            return Text("does not fit: the compiler ran out of it", style="red")
        m = self.memory
        room = "" if m.capacity is None else f" of {binary_bytes(m.capacity)}"
        style = "" if self.fits else "red"
        return Text(
            f"{binary_bytes(m.peak)}{room} at the peak: "
            f"{binary_bytes(m.arguments)} arguments, "
            f"{binary_bytes(m.outputs - m.aliased)} outputs beside them, "
            f"{binary_bytes(m.temporaries)} temporaries, "
            f"{binary_bytes(m.code)} code",
            style=style,
        )

    def _time(self) -> str:
        assert self.time is not None  # The caller checks this.
        t = self.time
        by_kernel = ""
        if t.busy > max(t.compute, t.memory):
            by_kernel = f" in each kernel ({seconds(t.busy)} in all)"
        return (
            f"{seconds(t.total)}: compute {seconds(t.compute)} or memory "
            f"{seconds(t.memory)}, whichever is longer{by_kernel}, and communication "
            f"{seconds(t.exposed)} that nothing hides"
        )

    def _collective_table(self) -> Table:
        table = Table(title="Collectives per step, on one device", title_justify="left")
        for name in ("kind", "dtype"):
            table.add_column(name)
        for name in ("count", "bytes each", "group", "time"):
            table.add_column(name, justify="right")
        table.add_column("over")
        for c in sorted(self.collectives, key=lambda c: -c.bytes * c.count):
            table.add_row(
                c.kind + (" (async)" if c.is_async else ""),
                c.dtype,
                f"{c.count:g}",
                f"{c.bytes:,}",
                f"{c.num_groups} x {c.group_size}",
                "" if c.seconds is None else seconds(c.seconds),
                _over(c),
            )
        return table


def _over(use: CollectiveUse) -> str:
    if use.num_slices > 1:
        return f"{use.num_slices} slices"
    return "several hosts" if use.spans_hosts else "one host"


def _draw(path: str | Path, plan: Plan, time: StepTime) -> None:
    """Draw an estimate to a file, in the format of the file's suffix."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "plan: drawing needs matplotlib. Install it with: "
            "pip install 'replicax[plan]'"
        ) from error
    with mpl.rc_context({"font.size": 9, "text.color": _INK, "axes.labelcolor": _INK}):
        columns = 2 if plan.scaling else 1
        figure = Figure(figsize=(5.2 * columns, 3.6), layout="constrained", dpi=160)
        axes = figure.subplots(1, columns, squeeze=False)[0]
        _draw_times(axes[0], time, plan.limit)
        if plan.scaling:
            _draw_scaling(axes[1], plan)
        figure.suptitle(
            f"{plan.program} on {plan.topology} ({plan.num_devices} devices): "
            "compiled, never run",
            fontsize=10,
        )
        figure.savefig(path)


def _draw_times(ax: "Axes", time: StepTime, limit: str) -> None:
    values = {
        "compute": time.compute,
        "memory traffic": time.memory,
        "communication": time.links + time.network,
        "step": time.total,
    }
    longest = max(values.values()) or 1.0
    for row, (name, value) in enumerate(values.items()):
        ax.barh(row, value / longest, color=_COLORS[name], height=0.6)
        ax.text(value / longest + 0.02, row, seconds(value), va="center")
    ax.set_yticks(range(len(values)), list(values))
    ax.invert_yaxis()
    ax.set_xlim(0, 1.3)
    ax.set_xticks([])
    ax.set_title(f"One step. First limit: {limit}", size=9)
    ax.set_xlabel(
        "step = the longer one of compute and memory traffic,\n"
        "and the communication that computation does not hide"
    )
    for side in ("top", "right", "bottom"):
        ax.spines[side].set_visible(False)


def _draw_scaling(ax: "Axes", plan: Plan) -> None:
    sizes = [s.num_devices for s in plan.scaling]
    percent = [100 * s.efficiency for s in plan.scaling]
    ax.plot(sizes, percent, marker="o", markersize=4, color=_COLORS["compute"])
    here = sizes.index(plan.num_devices)
    ax.plot(
        sizes[here],
        percent[here],
        marker="o",
        markersize=9,
        fillstyle="none",
        color=_COLORS["communication"],
        linestyle="none",
        label=f"{plan.topology}: {percent[here]:.1f} %",
    )
    ax.set_xscale("log", base=2)
    ax.set_xticks(sizes, [f"{s.num_devices}\n{s.hardware}" for s in plan.scaling])
    ax.set_ylim(0, 105)
    ax.set_ylabel("efficiency, %")
    ax.set_xlabel("devices and their arrangement; same batch on each")
    ax.grid(axis="y", color="#e4e7eb")
    ax.legend(frameon=False, loc="lower left")
    ax.set_title("Predicted weak scaling", size=9)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)

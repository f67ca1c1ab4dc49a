"""Tables, targets and pictures, from measurements that are written down here."""

import pytest

from bench.plots import draw
from bench.tables import disagreeing, headline, markdown
from bench.targets import TARGETS, figures, ratio_of


def entry(*seconds, losses=(2.0, 1.5, 1.0), first=1.0, memory=1e8):
    return {
        "seconds": list(seconds),
        "cpu_seconds": list(seconds),
        "losses": list(losses),
        "first_step_seconds": first,
        "memory_bytes": memory,
    }


def group(entries, case="a", layout="logical", left_out=()):
    return {
        "case": case,
        "title": "MLP",
        "layout": layout,
        "batch": 256,
        "steps": 10,
        "rounds": 3,
        "entries": entries,
        "left_out": dict(left_out),
        "machine": {
            "processor": "Some CPU",
            "cores": 2,
            "system": "Linux x86_64",
            "python": "3.11.7",
            "load_at_start": 0.1,
        },
        "versions": {"here": {"jax": "0.10.2", "keras": "3.15.1"}},
        "date": "2026-11-22",
    }


def test_ratios_are_those_of_neighbours_in_time() -> None:
    """A round in which the machine was slow for both does not count as a difference."""
    assert ratio_of([1.0, 10.0, 1.2], [1.0, 10.0, 1.0]) == (1.0, 1.0, 1.2)


def test_a_target_is_measured_against_the_fastest_of_several() -> None:
    found = figures(
        [
            group(
                {
                    "bare JAX": entry(1.0, 1.0, 1.0),
                    "replicax run": entry(1.0, 1.0, 1.0),
                    "replicax fit": entry(1.0, 1.0, 1.0),
                    "TF fit, tf_keras": entry(9.0, 9.0, 9.0),
                    "TF run, tf_keras": entry(1.4, 1.4, 1.4),
                }
            )
        ]
    )
    beside_tf = [f for f in found if "MirroredStrategy" in f.target.title]
    assert {f.ours for f in beside_tf} == {"replicax run", "replicax fit"}
    assert {f.theirs for f in beside_tf} == {"TF run, tf_keras"}
    assert [f.ratio[0] for f in beside_tf] == [1.4, 1.4]
    assert not any(f.is_met for f in beside_tf)  # 1.5 in this case.


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: f"{t.title} {t.layout}")
def test_entries_of_targets_exist(target) -> None:
    """A renamed entry would leave its target out without a word."""
    from bench.entries import entries_of

    for case in target.cases:
        names = {e.name for e in entries_of(case, target.layout)}
        assert set(target.ours) <= names
        assert set(target.theirs) & names


def test_losses_that_differ_are_named() -> None:
    measured = group(
        {
            "bare JAX": entry(1.0),
            "same": entry(1.0, losses=(2.0001, 1.501, 1.001)),
            "later": entry(1.0, losses=(2.0, 1.6, 1.0)),
            "first": entry(1.0, losses=(2.1, 1.5, 1.0)),
            "invalid": entry(1.0, losses=(float("nan"),) * 3),
        }
    )
    assert set(disagreeing(measured)) == {"later", "first", "invalid"}


def test_the_page_names_what_was_left_out_and_what_was_missed() -> None:
    page = markdown(
        [
            group(
                {
                    "bare JAX": entry(1.0, 1.0, 1.0),
                    "replicax run": entry(1.01, 1.0, 1.1),
                    "replicax fit": entry(1.5, 1.5, 1.6),
                },
                left_out={"torch": "there is no environment torch"},
            )
        ]
    )
    assert "Left out: torch (there is no environment torch)" in page
    assert "| replicax run | bare JAX | ≤ 1.03 | 1.01 (1.00 to 1.10) | yes |" in page
    assert "| replicax fit | bare JAX | ≤ 1.03 | 1.50 (1.50 to 1.60) | **no** |" in page
    assert "Some CPU, 2 cores" in page


def test_pictures_of_all_layouts(tmp_path) -> None:
    names = ("bare JAX", "replicax fit", "torch DDP")
    groups = [
        group({n: entry(1.0, 1.1, 1.3) for n in names}, layout=layout)
        for layout in ("one", "logical", "processes", "gpu")
    ]
    files = draw(groups, tmp_path)
    assert [file.name for file in files] == [
        "step_time_one.png",
        "step_time_logical.png",
        "step_time_processes.png",
        "step_time_gpu.png",
    ]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


def test_the_page_begins_with_ratios_to_ours() -> None:
    page = markdown(
        [
            group(
                {
                    "bare JAX": entry(1.0, 1.0, 1.0),
                    "replicax fit": entry(2.0, 2.0, 2.0),
                    "torch": entry(5.0, 5.0, 6.0),
                },
                case=case,
                layout="one",
            )
            for case in "ab"
        ]
    )
    short = page.split("## In short")[1].split("## Targets")[0]
    assert "| one device with all cores | (a) | (b) |" in short
    assert "| bare JAX | 0.50 | 0.50 |" in short
    assert "| torch | 2.50 | 2.50 |" in short


def gpu_group(gpu):
    """One step takes the bare program 10 ms, and those after it longer."""
    measured = group(
        {
            "bare JAX": entry(0.010, 0.010),
            "replicax run": entry(0.010, 0.010),
            "replicax fit": entry(0.0105, 0.0105),
            "torch": entry(0.020, 0.020, losses=(2.01, 1.5, 1.0)),
        },
        "g",
        "gpu",
    )
    measured |= {"unit": "images", "units": 96, "flops": 2e12, "dtype": "bfloat16"}
    measured["machine"]["gpu"] = gpu
    for found in measured["entries"].values():
        found["device_bytes"] = 5e9
    return measured


def test_a_gpu_has_columns_of_its_own() -> None:
    page = markdown([gpu_group("NVIDIA H100 80GB HBM3")])
    assert "Linux x86_64, NVIDIA H100 80GB HBM3; Python" in page
    assert "| GPU memory MB |" in page
    assert "| 1.00 | 9600 | 20.2 % | 1.0 | 5000 | 1.0000 |" in page
    assert "| ≤ 1.0204 | 1.00 | yes |" in page
    assert "| ≤ 1.0204 | 1.05 | **no** |" in page
    assert "| replicax fit | torch | ≥ 1.0 | 1.90 | yes |" in page


def test_an_unknown_gpu_has_no_utilisation() -> None:
    assert "| 1.00 | 9600 |  | 1.0 | 5000 |" in markdown([gpu_group("Some card")])


def test_losses_in_bfloat16_agree_less_closely() -> None:
    measured = gpu_group(None)
    assert disagreeing(measured) == {}
    measured["dtype"] = "float32"
    assert set(disagreeing(measured)) == {"torch"}


def test_no_library_is_times_faster_that_is_slower() -> None:
    entries = {"bare JAX": entry(1.0), "replicax fit": entry(1.0)}
    tuned = {"replicax fit, tuned": entry(0.5)}
    lines = headline(
        [
            group({**entries, "torch DDP": entry(2.0)}, "a", "processes"),
            group({**entries, "torch DDP": entry(0.8), **tuned}, "d", "processes"),
        ]
    )
    assert lines == [
        "| times faster than | (a) MLP | (d) MobileNetV2 |",
        "|---|---|---|",
        "| torch DDP, two processes | 2.0 | slower |",
        "",
        "torch DDP takes 0.80 (d) times as long as `fit`, and with "
        "`REPLICAX_CPU=tuned` 1.60 (d) times.",
    ]

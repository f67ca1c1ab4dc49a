"""The page: escaped, self-contained, and complete about what it leaves out."""

import math
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicax.report.charts import Series, chart_of, ticks
from replicax.report.page import page_of, rendered
from replicax.report.runs import (
    EpochRecord,
    Fit,
    FitBegin,
    FitEnd,
    MemoryUse,
    Run,
    WorkerRecord,
)

HOSTILE = "</title><script>alert(1)</script><img src=//evil.test onerror='x'>\"&"
VOID = {"meta", "path", "br", "img", "link", "input", "hr"}


class Parsed(HTMLParser):
    """Tags with their attributes; raises where they do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID or tag == "path":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def epoch(number, logs=None, **fields):
    values = {
        "logs": {"loss": 2.0 / (number + 1)} if logs is None else logs,
        "wall_s": 1.0,
        "counts": {"steps": 20, "examples": 1280, "executions": 20, "stalled_s": 0.25},
        "memory": MemoryUse(of="device", bytes=2**30, peak_bytes=2**31),
    } | fields
    return EpochRecord(number=number, **values)


def fit(*epochs, number=1, counts_own=False, facts=None, **fields):
    begin = FitBegin(
        worker="worker:0",
        number=number,
        counts_own=counts_own,
        facts={"model": "digits"} | (facts or {}),
        time=0.0,
    )
    end = FitEnd(**{"state": "running"} | fields)
    return Fit(begin=begin, last=60.0, epochs=list(epochs), end=end)


def page(*fits, **names):
    workers = [WorkerRecord(name="worker:0", fits=list(fits))]
    return page_of(Run(workers=workers, missing=names.get("missing", [])))


def test_names_are_escaped() -> None:
    logs = {HOSTILE: 1.0, f"val_{HOSTILE}": 2.0}
    facts = {"model": HOSTILE, HOSTILE: HOSTILE, "host": HOSTILE}
    hostile = fit(
        epoch(0, logs),
        epoch(1, logs),
        facts=facts,
        state="interrupted",
        error=HOSTILE,
        diagnosis=HOSTILE,
        shares={"input": 0.5, HOSTILE: 0.5},
    )
    workers = [WorkerRecord(name=HOSTILE, fits=[hostile])]
    text = page_of(Run(workers=workers, missing=[HOSTILE]))
    tags = Parsed(text).tags
    assert not {"script", "img", "a", "link", "iframe", "base"} & {t for t, _ in tags}
    assert not [a for _, attrs in tags for a in attrs if a.startswith("on")]


def test_it_loads_nothing() -> None:
    text = page(fit(epoch(0), epoch(1), state="done"))
    assert "default-src 'none'" in text
    assert not re.search(r"https?:|//|@import|url\(|\bsrc=|\bhref=", text)


def test_every_chart_has_a_description() -> None:
    text = page(fit(epoch(0), epoch(1), epoch(2), state="done"))
    tags = Parsed(text).tags
    plots = [a for t, a in tags if t == "div" and a.get("class") == "plot"]
    assert len(plots) == sum(t == "figure" for t, _ in tags)
    labels = [a["aria-label"] for a in plots]
    assert labels[0] == "loss: training from 2 in epoch 1 to 0.6667 in epoch 3"
    assert all(a["role"] == "img" for a in plots)


@pytest.mark.parametrize("state", ["running", "done", "interrupted"])
def test_the_page_shows_the_state_and_reloads_itself_while_it_runs(state: str) -> None:
    text = page(fit(epoch(0), state=state, error="ValueError: bad"))
    assert f'<span class="state {state}">{state}</span>' in text
    assert ("was interrupted: ValueError: bad" in text) == (state == "interrupted")
    tags = Parsed(text).tags
    reloads = [a["content"] for _, a in tags if a.get("http-equiv") == "refresh"]
    assert reloads == (["5"] if state == "running" else [])
    assert "script" not in {tag for tag, _ in tags}


def test_the_page_before_the_end_of_an_epoch() -> None:
    assert "No epoch has ended yet" in page(fit())


def test_nan_is_a_gap() -> None:
    values = [1.0, 2.0, math.nan, 3.0, math.inf, 4.0]
    epochs = [epoch(i, {"loss": v}) for i, v in enumerate(values)]
    text = page(fit(*epochs))
    figure = text[text.index("<figure") : text.index("</figure>")]
    line = re.search(r'class="line" d="([^"]*)"', figure)
    assert line is not None
    assert line[1].count("M") == 3
    assert figure.count('class="dot"') == 4
    assert "Not finite in 2 epochs, first in epoch 3." in figure


def test_large_ratios_are_logarithmic() -> None:
    epochs = [epoch(i, {"loss": 10.0 ** (3 - i)}) for i in range(6)]
    assert "loss (logarithmic)" in page(fit(*epochs))


def test_many_workers_are_summed_up() -> None:
    workers = [
        WorkerRecord(name=f"worker:{i}", fits=[fit(epoch(0))]) for i in range(16)
    ]
    text = page_of(Run(workers=workers, missing=[]))
    assert "highest of 16 workers" in text
    assert text.count('<th scope="row">worker:') == 16


def test_curves_of_many_points_have_no_tooltips() -> None:
    epochs = [epoch(i, {"loss": math.sin(i)}) for i in range(501)]
    assert 'class="dot"' not in page(fit(*epochs))
    assert 'class="dot"' in page(fit(*epochs[1:]))


def test_staleness_is_shown_where_there_is_any() -> None:
    assert "Staleness of gradients" not in page(fit(epoch(0)))
    text = page(fit(epoch(0, staleness={0: 3, 4: 1})))
    assert "Staleness of gradients" in text
    assert "<td>1, 4</td>" in text


FLOATS = st.floats(-1e9, 1e9) | st.floats()


@given(st.lists(FLOATS, min_size=1, max_size=50), st.booleans())
def test_any_values_can_be_drawn(values, from_zero) -> None:
    points = [(float(i), y) for i, y in enumerate(values)]
    chart = chart_of("any", [Series(name="s", parts=[points])], from_zero=from_zero)
    text = rendered("chart.html", chart=chart)
    Parsed(text)
    for place in re.findall(r'class="line" d="([^"]*)"', text):
        numbers = re.findall(r"-?[\d.]+", place)
        assert all(0 <= float(n) <= 1000 for n in numbers)


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_few_and_inside(low, size) -> None:
    values = ticks(low, low + size)
    assert 1 <= len(values) <= 7
    room = 1e-6 * (abs(low) + size)
    assert all(low - room <= t <= low + size + room for t in values)
    assert values == sorted(values)


def test_names_that_are_no_utf8() -> None:
    text = page(fit(epoch(0), facts={"script": "train\udce9.py"}))
    assert "train\\udce9.py" in text
    assert text.encode()


def test_a_restarted_worker_counts_once() -> None:
    once = fit(epoch(0), counts_own=True)
    again = fit(epoch(0), epoch(1), counts_own=True)
    workers = [
        WorkerRecord(name="worker:0", fits=[again]),
        WorkerRecord(name="worker:1", fits=[once, again]),
    ]
    text = page_of(Run(workers=workers, missing=[]))
    assert "<dd>2,560</dd>" in text
    assert "all workers from 2,560 in epoch 1 to 2,560 in epoch 2" in text


def test_memory_has_round_numbers() -> None:
    text = page(fit(epoch(0, memory=MemoryUse(bytes=450 * 2**20))))
    figure = text[text.index("Memory of the process") :]
    assert ">400 MiB<" in figure
    assert "epoch 1: 450 MiB" in figure

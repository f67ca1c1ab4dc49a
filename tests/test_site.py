"""The site of the documentation: it builds, and is complete by itself."""

import fcntl
import importlib.util
import operator
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import replicax as rx

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
HOOKS = DOCS / "hooks"
TIMEOUT_S = 240

BROWSER = next(
    filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])),
    None,
)

FIGURES = {
    "one-device": "one-device",
    "mirrored": "mirrored",
    "multi-worker": "multi-worker",
    "central-storage": "central-storage",
    "parameter-servers": "parameter-servers",
    "tpu": "tpu",
    "fully-sharded": "fully-sharded",
    "model-parallel": "model-parallel",
    "sharding": "sharded-update",
}
"""Pages of the strategies, and each one's figure."""

DISTRIBUTE = {
    "": """
        CrossDeviceOps DistributedDataset DistributedIterator DistributedValues
        HierarchicalCopyAllReduce InputContext InputOptions InputReplicationMode
        MirroredStrategy MultiWorkerMirroredStrategy NcclAllReduce OneDeviceStrategy
        ParameterServerStrategy ReduceOp ReductionToOneDevice ReplicaContext RunOptions
        Server Strategy StrategyExtended TPUStrategy experimental_set_strategy
        get_replica_context get_strategy has_strategy in_cross_replica_context
    """,
    "cluster_resolver.": """
        ClusterResolver GCEClusterResolver KubernetesClusterResolver
        SimpleClusterResolver SlurmClusterResolver TFConfigClusterResolver
        TPUClusterResolver UnionResolver
    """,
    "coordinator.": """
        ClusterCoordinator PerWorkerValues RemoteValue
        experimental_get_current_worker_index
    """,
    "experimental.": """
        CentralStorageStrategy CollectiveCommunication CollectiveHints
        CommunicationImplementation CommunicationOptions MultiWorkerMirroredStrategy
        ParameterServerStrategy PreemptionCheckpointHandler PreemptionWatcher
        TPUStrategy TerminationConfig ValueContext
    """,
    "experimental.coordinator.": "ClusterCoordinator PerWorkerValues RemoteValue",
    "experimental.partitioners.": """
        FixedShardsPartitioner MaxSizePartitioner MinSizePartitioner Partitioner
    """,
    "experimental.rpc.": "Client Server",
}
"""The public names of `tf.distribute`, from TensorFlow's API documentation."""

STRATEGY_METHODS = """
    scope num_replicas_in_sync run reduce gather cluster_resolver extended
    experimental_local_results experimental_distribute_dataset
    distribute_datasets_from_function experimental_distribute_values_from_function
"""

LOADING_TAGS = """
    audio embed iframe img input link object script source track use video
"""


class Requests(HTMLParser):
    """What a browser fetches for a page, beside the page."""

    LOADS = frozenset(LOADING_TAGS.split())

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._is_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._is_style = tag == "style"
        given = {name: value or "" for name, value in attrs}
        # These are for readers' machines and search engines; nothing is fetched.
        if tag == "link" and given.get("rel") in {"canonical", "next", "prev"}:
            return
        names = ("src", "srcset", "data", "poster", "href", "xlink:href")
        if tag in self.LOADS:
            self.found += [given[name] for name in names if name in given]
        self.found += urls_of_css(given.get("style", ""))

    def handle_data(self, data: str) -> None:
        if self._is_style:
            self.found += urls_of_css(data)


def urls_of_css(text: str) -> list[str]:
    """What a style sheet loads."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    urls = re.findall(r"url\(\s*['\"]?([^'\")]+)", text)
    return urls + re.findall(r"@import\s+['\"]([^'\"]+)", text)


def is_external(url: str) -> bool:
    return url.startswith("//") or bool(re.match(r"(?!data:)[a-zA-Z][\w+.-]*:", url))


def hook(name: str) -> ModuleType:
    """A module of the build, which is no package."""
    spec = importlib.util.spec_from_file_location(name, HOOKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Dataclasses look their module up.
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. Pages without place, links without end: all are errors.

    Processes of pytest-xdist share it: it takes one of them ten seconds.
    """
    for package in ("material", "mkdocstrings_handlers.python"):
        pytest.importorskip(package, reason="the docs extra is not installed")
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    folder = root / "site"
    with (root / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # It ends with the file.
        if not folder.exists():
            _build(root / "site-unfinished")
            (root / "site-unfinished").rename(folder)
    return folder


def _build(folder: Path) -> None:
    """Build the site; an error, or a warning, fails who asks for it."""
    process = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr


def test_every_page_is_built(site: Path) -> None:
    missing = [
        page.name
        for page in DOCS.glob("*.md")
        if not (site / page.with_suffix(".html").name).is_file()
    ]
    assert not missing


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > len(FIGURES)
    for page in pages:
        requests = Requests()
        requests.feed(page.read_text(encoding="utf-8"))
        assert requests.found, page.name  # Each page has style sheets at least.
        external = [url for url in requests.found if is_external(url)]
        assert not external, page.name
    for sheet in (*site.rglob("*.css"), *site.rglob("*.svg")):
        text = sheet.read_text(encoding="utf-8")
        external = [url for url in urls_of_css(text) if is_external(url)]
        assert not external, sheet.name


def test_what_counts_as_loaded() -> None:
    requests = Requests()
    requests.feed(
        '<link rel="stylesheet" href="https://a.example/x.css"><a href="https://b.example">'
        '<script src="//c.example/x.js"></script><img src="figures/x.svg">'
        "<style>@import 'https://d.example/y.css';p{background:url(data:x)}</style>"
        '<p style="background:url(https://e.example/z.png)">'
    )
    external = [url for url in requests.found if is_external(url)]
    assert [url.split("//")[1][0] for url in external] == ["a", "c", "d", "e"]


@pytest.mark.parametrize("page", FIGURES)
def test_strategy_has_its_figure(site: Path, page: str) -> None:
    name = FIGURES[page]
    assert f"(figures/{name}.svg)" in (DOCS / f"{page}.md").read_text(encoding="utf-8")
    html = (site / f"{page}.html").read_text(encoding="utf-8")
    (svg,) = re.findall(r'<svg [^>]*class="rx-figure".*?</svg>', html, re.DOTALL)
    for part in ("title", "desc"):  # For those who do not see it.
        assert re.search(rf"<{part} id=\"rx-{name}-\w+\">[^<]{{5,}}</{part}>", svg)


def test_figures_are_as_drawn() -> None:
    """The files, for readers of the sources, are those that the build draws."""
    process = subprocess.run(
        [sys.executable, str(HOOKS / "draw_figures.py"), "--check"],
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr


def public(name: str) -> Any:
    """What a script gets under a name below `replicax`."""
    module, *parts = name.split(".")
    value = (
        importlib.import_module(f"replicax.{module}") if parts else getattr(rx, module)
    )
    for part in parts:
        value = getattr(value, part)
    return value


def test_every_public_name_has_its_entry(site: Path) -> None:
    """Of packages that were given as `module.*`, every name; of classes, methods."""
    html = "".join(p.read_text(encoding="utf-8") for p in (site / "api").glob("*.html"))
    ids = set(re.findall(r'id="replicax\.([\w.]+)"', html))
    api_pages = hook("api_pages")
    shown = [
        name
        for page in api_pages.PAGES.values()
        for name in api_pages.expanded(page.names)
    ]
    assert not sorted(set(shown) - ids)
    methods = {f"Strategy.{name}" for name in api_pages.STRATEGY}
    assert not sorted(methods - ids)
    assert "doc-symbol-heading doc-symbol-module" not in html  # In a function's place.
    for name in shown:
        public(name)


def test_docstrings_are_read_as_they_are_written(site: Path) -> None:
    """Sentences stay whole, and samples are code."""
    text = (site / "api" / "steps.html").read_text(encoding="utf-8")
    words = " ".join(re.sub(r"<[^>]+>", "", text).split())
    assert "an object that is false and whose use raises ContextError" in words
    for page in (site / "api").glob("*.html"):
        html = page.read_text(encoding="utf-8")
        assert "<blockquote" not in html, page.name  # `>>>` as Markdown has it.


def own_part(site: Path, page: str, name: str) -> str:
    """What stands on an API page below a name's heading, up to the next heading."""
    html = (site / "api" / page).read_text(encoding="utf-8")
    found = re.search(
        rf'<h\d id="replicax\.{name}".*?(?=<h\d id=|</article>)', html, re.S
    )
    assert found is not None, name
    return found[0]


def test_constructors_are_shown_to_those_who_call_them(site: Path) -> None:
    given = {
        "strategies.html": ["Strategy"],
        "steps.html": ["ReplicaContext"],
        "input.html": [r"input\.DistributedDataset", "InputContext"],
        "checkpoints.html": ["RestoreStatus"],
        "plans.html": [r"planning\.report\.Plan"],
    }
    for page, names in given.items():
        for name in names:
            part = own_part(site, page, name)
            assert "doc-signature" not in part, name
            assert "Parameters:" not in part, name
    made = {
        "strategies.html": "MirroredStrategy",
        "gradients.html": "CommunicationOptions",
        "estimator.html": r"estimator\.RunConfig",
    }
    for page, name in made.items():
        part = own_part(site, page, name)
        assert "doc-signature" in part, name
        assert "Parameters:" in part, name


def test_results_are_not_read_as_types(site: Path) -> None:
    """Words before a colon, where a docstring says what is returned."""
    item = r'<li class="doc-section-item field-body">\s*<code>(.*?)</code>'
    for page in (site / "api").glob("*.html"):
        for found in re.findall(item, page.read_text(encoding="utf-8"), re.DOTALL):
            words = re.sub(r"<[^>]+>", "", found)
            assert " " not in re.sub(r"\[.*\]| \| ", "", words), f"{page.name}: {words}"


def test_names_lead_to_the_api(site: Path) -> None:
    html = (site / "mirrored.html").read_text(encoding="utf-8")
    assert 'href="api/strategies.html#replicax.MirroredStrategy"' in html
    assert 'href="api/strategies.html#replicax.Strategy.check_replicas"' not in html
    html = (site / "custom-loops.html").read_text(encoding="utf-8")
    assert 'href="api/strategies.html#replicax.Strategy.run"' in html
    assert "<autoref" not in html


def test_a_lost_reader_is_shown_the_way(site: Path) -> None:
    assert 'href="/index.html">overview<' in (site / "404.html").read_text("utf-8")


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome is installed")
def test_search_works_in_a_folder(site: Path, tmp_path: Path) -> None:
    """Without a server, and so without workers and requests."""
    assert BROWSER is not None
    process = subprocess.run(
        [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--virtual-time-budget=20000",
            "--dump-dom",
            (site / "index.html").as_uri() + "?q=ParameterServerStrategy",
        ],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    found = re.findall(
        r'<a href="([^"]*)" class="md-search-result__link', process.stdout
    )
    pages = {url.partition("?")[0].rpartition("/")[2] for url in found}
    assert {"strategies.html", "parameter-servers.html"} <= pages, process.stderr


@pytest.mark.parametrize(
    "page",
    sorted(DOCS.glob("*.md")),
    ids=lambda page: page.stem,
)
def test_replicax_is_imported_before_keras(page: Path) -> None:
    """It chooses Keras' backend, which whoever tries a sample may not have set."""
    text = page.read_text(encoding="utf-8")
    for code in re.findall(
        r"^```python.*?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL
    ):
        keras = re.search(r"^(import|from) .*\bkeras\b", code, re.MULTILINE)
        if keras is not None:
            later = code[keras.end() :]
            assert not re.search(r"^import replicax", later, re.MULTILINE), code


def test_members_on_the_api_pages_exist() -> None:
    missing = [
        f"{name}.{member}"
        for name, members in hook("api_pages").MEMBERS.items()
        for member in members
        if not hasattr(operator.attrgetter(name)(rx), member)
    ]
    assert missing == []


def test_api_page_for_a_name_that_is_not_public(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    api_pages = hook("api_pages")
    wrong = api_pages.Page(title="Wrong", text="", names=("NoSuchStrategy",))
    monkeypatch.setitem(api_pages.PAGES, "wrong.md", wrong)
    with pytest.raises(ValueError, match=r"not public: \['NoSuchStrategy'\]"):
        api_pages.pages()
    monkeypatch.delitem(api_pages.PAGES, "wrong.md")
    monkeypatch.delitem(api_pages.PAGES, "errors.md")
    with pytest.raises(ValueError, match=r"on no page: .*'ContextError'"):
        api_pages.pages()


def rows(page: str) -> Iterator[tuple[str, str]]:
    """The first two cells of the rows of all tables of a page."""
    for line in (DOCS / page).read_text(encoding="utf-8").splitlines():
        if line.startswith("| "):
            cells = line.strip("| ").split(" | ")
            yield cells[0], cells[1] if len(cells) > 1 else ""


def test_every_name_of_tf_distribute_has_a_row() -> None:
    first = " ".join(cell for cell, _ in rows("coming-from-tf-distribute.md"))
    names = [
        f"tf.distribute.{module}{name}"
        for module, words in DISTRIBUTE.items()
        for name in words.split()
    ]
    assert not [n for n in names if not re.search(rf"`{re.escape(n)}[`(.]", first)]
    methods = STRATEGY_METHODS.split()
    assert not [m for m in methods if not re.search(rf"[`.]{m}\b", first)]


def test_every_strategy_can_be_chosen() -> None:
    choices = " ".join(cell for _, cell in rows("choosing-a-strategy.md"))
    strategies = [name for name in rx.__all__ if name.endswith("Strategy")]
    strategies.remove("Strategy")
    assert len(strategies) > 7
    assert not [name for name in strategies if f"`{name}" not in choices]


@pytest.mark.parametrize(
    "page",
    [
        "coming-from-tf-distribute.md",
        "coming-from-accelerate.md",
        "coming-from-keras-distribution.md",
    ],
)
def test_counterparts_exist(page: str) -> None:
    """A name of replicax in a table is one."""
    cells = " ".join(" ".join(row) for row in rows(page))
    names = sorted(set(re.findall(r"`rx\.([A-Za-z_][\w.]*\w)", cells)))
    assert names
    for name in names:
        assert public(name) is not None, f"{page}: rx.{name}"

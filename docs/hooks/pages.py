"""What the build of the site does beside turning Markdown into pages.

The pages of `docs` are written to be read on a code host, too. Here they are fitted to
the site: figures are drawn and put into the pages, so that they follow the site's
switch between light and dark, and pages of the API are made from the sources' names.
"""

import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from api_pages import PAGES, STRATEGY, expanded, pages
from draw_figures import SITE_STYLE, drawings
from mkdocs.structure.files import File, Files

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]*\)")
_LOST = "<h1>404 - Not found</h1>"
_CELL = re.compile(r"(?<=<code>)[^<]+(?=</code>)")
_LONG = re.compile(r"\w{20,}")
_BREAK = re.compile(r"(?<=[.(=/])(?<!rx\.)(?=[A-Za-z])")
_BREAK_IN_LONG = re.compile(r"(?<=_)(?=\w)|(?<=[a-z])(?=[A-Z])")
_NAME = re.compile(r"<code>((rx|strategy)\.([\w.]*\w))(?:\([^<]*\))?</code>")
_OPTION = re.compile(r"<code>(?=--[^<]{1,30}</code>)")
_CLOSED = re.compile(r"(<(a|pre|h\d)\b.*?</\2>)", re.DOTALL)
_NAME_ALONE = re.compile(
    r'<div class="doc-signature highlight"><pre><span></span><code>'
    r'<span class="n">\w+</span>\s*</code></pre>\s*</div>'
)
_FIGURE = re.compile(r'<p><img alt="[^"]*" src="figures/([\w-]+\.svg)" ?/?></p>')


ENTRIES = frozenset(
    {f"rx.{name}" for page in PAGES.values() for name in expanded(page.names)}
)
"""Names that have an entry in the API pages, as samples write them."""

SEARCH = {
    **dict.fromkeys((f"{name.removesuffix('.svg')}.md" for name in drawings()), 4.0),
    "index.md": 2.0,
    "architecture.md": 0.5,
    "seeds.md": 0.3,
}
"""How much a page counts in a search, beside 1: strategies are found at their pages."""


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages of the API, the figures and their colours."""
    made: dict[str, str] = {f"figures/{name}": svg for name, svg in drawings().items()}
    made |= {f"api/{name}": text for name, text in pages().items()}
    made["assets/figures.css"] = SITE_STYLE
    made["results.md"] = (RESULTS / "README.md").read_text(encoding="utf-8")
    for picture in RESULTS.glob("*.png"):
        source = f"results/{picture.name}"
        files.append(File.generated(config, source, abs_src_path=str(picture)))
    for path, content in made.items():
        there = files.get_file_from_path(path)
        if there is not None:
            files.remove(there)
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Take away what is for the tests, and links to files that the site has not."""
    if page.file.src_uri in SEARCH:
        page.meta["search"] = {"boost": SEARCH[page.file.src_uri]}
    markdown = markdown.replace("](../benchmarks/results/README.md)", "](results.md)")
    markdown = markdown.replace("](../benchmarks/results/", "](results/")
    markdown = re.sub(r"^```python no-run$", "```python", markdown, flags=re.MULTILINE)
    return _OUTSIDE.sub(r"\1", markdown)


def breakable(cell: str) -> str:
    """A table's cell whose names may break: after dots, and long ones within."""

    def long(word: re.Match[str]) -> str:
        return _BREAK_IN_LONG.sub("<wbr>", word[0])

    def name(content: re.Match[str]) -> str:
        return _LONG.sub(long, _BREAK.sub("<wbr>", content[0]))

    return _CELL.sub(name, cell)


def linked(html: str) -> str:
    """The page with each name of the API, where it comes first, as a link."""
    seen = set()

    def link(code: re.Match[str]) -> str:
        name, kind, rest = code[1], code[2], code[3]
        if name in seen:
            return code[0]
        target = f"replicax.{rest}" if name in ENTRIES else ""
        if kind == "strategy" and rest in STRATEGY:
            target = f"replicax.Strategy.{rest}"
        if not target:
            return code[0]
        seen.add(name)
        return f'<autoref identifier="{target}">{code[0]}</autoref>'

    # Of three parts, the second is a link, a sample or a heading, the third its tag.
    parts = _CLOSED.split(html)
    parts[::3] = [_NAME.sub(link, part) for part in parts[::3]]
    return "".join(part for i, part in enumerate(parts) if i % 3 != 2)


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    """Put figures into the page; link names, and let them break; say none twice."""
    drawn = drawings()

    def inline(match: re.Match[str]) -> str:
        svg = drawn.get(match[1])
        return match[0] if svg is None else f'<div class="rx-frame">{svg}</div>'

    html = _NAME_ALONE.sub("", html)
    if not page.file.src_uri.startswith("api/"):
        html = linked(html)
    html = re.sub(r"<td\b.*?</td>", lambda td: breakable(td[0]), html, flags=re.DOTALL)
    html = _OPTION.sub('<code class="rx-option">', html)
    return _FIGURE.sub(inline, html)


def on_post_template(output: str, *, template_name: str, config: Any, **_: Any) -> str:
    """Say on the page for lost readers where to go.

    Raises:
        ValueError: If the theme's page is not what it was.
    """
    if template_name != "404.html":
        return output
    if _LOST not in output:
        raise ValueError(f"pages: the theme's 404.html has no {_LOST!r} to replace.")
    home = urlsplit(config.site_url or "/").path
    return output.replace(
        _LOST,
        "<h1>No such page</h1>\n<p>It may have moved. Search for it above, or begin at "
        f'the <a href="{home}index.html">overview</a>.</p>',
    )

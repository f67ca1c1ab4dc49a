"""What the build of the site does beside turning Markdown into pages.

The pages of `docs` are written to be read on a code host, too. Here they are fitted to
the site: figures are drawn and put into the pages, so that they follow the site's
switch between light and dark, and pages of the API are made from the sources' names.
"""

import re
from typing import Any

from api_pages import pages
from draw_figures import SITE_STYLE, drawings
from mkdocs.structure.files import File, Files

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]*\)")
_CELL = re.compile(r"(?<=<code>)[^<]+(?=</code>)")
_BREAK = re.compile(r"(?<=[._(=/])(?<!rx\.)(?=\w)|(?<=[a-z])(?=[A-Z])")
_FIGURE = re.compile(r'<p><img alt="[^"]*" src="figures/([\w-]+\.svg)" ?/?></p>')


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages of the API, the figures and their colours."""
    made: dict[str, str] = {f"figures/{name}": svg for name, svg in drawings().items()}
    made |= {f"api/{name}": text for name, text in pages().items()}
    made["assets/figures.css"] = SITE_STYLE
    for path, content in made.items():
        there = files.get_file_from_path(path)
        if there is not None:
            files.remove(there)
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Take away what is for the tests, and links to files that the site has not."""
    markdown = re.sub(r"^```python no-run$", "```python", markdown, flags=re.MULTILINE)
    markdown = re.sub(r"^<!-- test: .* -->\n", "", markdown, flags=re.MULTILINE)
    return _OUTSIDE.sub(r"\1", markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Put the strategies' figures into the page itself; let names in tables break."""
    drawn = drawings()

    def breakable(match: re.Match[str]) -> str:
        return _CELL.sub(lambda name: _BREAK.sub("<wbr>", name[0]), match[0])

    def inline(match: re.Match[str]) -> str:
        svg = drawn.get(match[1])
        return match[0] if svg is None else f'<div class="rx-frame">{svg}</div>'

    html = re.sub(r"<td\b.*?</td>", breakable, html, flags=re.DOTALL)
    return _FIGURE.sub(inline, html)

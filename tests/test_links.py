"""Every link from one of our pages to another leads somewhere, to the heading that it names."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    page for pattern in ("*.md", "notebooks/*.md", "notebooks/*.ipynb", "notebooks/room/*.md", "exercises/*.md",
                         "exercises/*.ipynb", "exercises/solutions/*.ipynb")
    for page in ROOT.glob(pattern)
)


def text_of(page: Path) -> str:
    """A page's Markdown, without blocks of code."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = nbformat.reads(text, as_version=4).cells
        text = "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def links(text: str) -> list[str]:
    """Where the links and pictures of a Markdown text lead, but for addresses of the web, and for code."""
    text = re.sub(r"`[^`\n]*`", "", text)
    targets = re.findall(r"\]\(\s*<?([^)\s>]+)", text) + re.findall(r"""(?:src|href)=["']([^"']+)""", text)
    return [target for target in targets if not re.match(r"[a-z][a-z0-9+.-]*:", target)]


def anchors(text: str) -> set[str]:
    """The names that GitHub gives to a text's headings."""
    headings = re.findall(r"^#{1,6} +(.+?) *$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """Links of a page that lead to no file, or to no heading of it."""
    broken = []
    for link in links(text_of(page)):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(text_of(target))):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_link_of_ours_is_broken(page):
    assert not (broken := broken_links(page)), f"{page.name} links to what is not there: {', '.join(broken)}"


def notebook_of(*markdown: str) -> str:
    cells = [nbformat.v4.new_markdown_cell(text) for text in markdown]
    return nbformat.writes(nbformat.v4.new_notebook(cells=cells))


@pytest.mark.parametrize("name", ["page.md", "page.ipynb"])
def test_a_broken_link_is_found(tmp_path, name):
    (tmp_path / "other.md").write_text("# A title, with `code` & more\n")
    good = (
        "# Here\n\n[a](other.md), [b](other.md#a-title-with-code--more), [c](#here), [d](https://example.org/no.md), "
        "`[e](code.md)`"
    )
    bad = "[f](gone.ipynb), ![f](gone.png), [g](other.md#no-such), [h](#nowhere)"
    texts = {"page.md": (good, f"{good}\n\n{bad}"), "page.ipynb": (notebook_of(good), notebook_of(good, bad))}[name]
    page = tmp_path / name
    found = []
    for text in texts:
        page.write_text(text)
        found.append(broken_links(page))
    assert found == [[], ["gone.ipynb", "gone.png", "other.md#no-such", "#nowhere"]]


def test_every_chapter_links_to_its_neighbours_and_every_exercise_is_linked_from_a_chapter():
    chapters = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
    found = {page.name: links(text_of(page)) for page in chapters}
    for before, after in pairwise(chapters):
        assert after.name in found[before.name] and before.name in found[after.name]
    linked = {Path(link).name for each in found.values() for link in each if link.startswith("../exercises/")}
    assert linked == {page.name for page in (ROOT / "exercises").glob("[0-9]*.ipynb")}

"""The terms of notebooks/GLOSSARY.md, linked where a page first uses them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

GLOSSARY = Path(__file__).resolve().parents[2] / "notebooks/GLOSSARY.md"

# What holds no prose: code, formulas, links, headings, rows of a table, HTML, addresses.
SKIPPED = r"```.*?```|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]+\$|!?\[[^\]]*\]\([^)]*\)|^ *[#|][^\n]*$|<[^>\n]+>|https?://\S+"

EVERYDAY = ("round", "scale")  # in most texts these are not the term, so they are not linked


def terms(glossary: str) -> dict[str, str]:
    """Each spelling that the glossary explains, and the row that explains it.

    The row "grouped-query attention (GQA)" explains two spellings, "percentile: p50, p99" three.
    """
    rows = re.findall(r"^\| (?!term \|)([^|]+?) \| .+ \|$", glossary, flags=re.MULTILINE)
    return {spelling: row for row in rows for spelling in re.split(r"[,:()]\s*|\s+(?=\()", row) if spelling}


def link_first_uses(texts: Sequence[str], glossary: str, address: str) -> list[str]:
    """A page's Markdown cells with a link to `address` at the first use of each row of the glossary.

    Code, headings and existing links stay as they are. A spelling is found with another first letter too (small or
    capital), in the plural, and over the end of a line. A page that has such links already gets no second ones.
    """
    rows = {spelling: row for spelling, row in terms(glossary).items() if spelling not in EVERYDAY}
    linked: set[str] = set()

    def link(match: re.Match) -> str:
        words = " ".join((match["term"] or match["there"] or "").split())
        singular = (words.lower().removesuffix(end) for end in ("", "s", "es"))
        spelling = next((known[word] for word in singular if word in known), None)
        if not spelling or rows[spelling] in linked or words[1 : len(spelling)] != spelling[1:]:
            return match[0]
        linked.add(rows[spelling])
        return match[0] if match["there"] else f"[{match[0]}]({address})"

    known = {spelling.lower(): spelling for spelling in rows}
    either = "|".join(re.escape(each).replace(r"\ ", r"\s+") for each in sorted(rows, key=len, reverse=True))
    there = rf"\[(?P<there>[^\]]*)\]\({re.escape(address)}\)"
    term = rf"(?<![\w-])(?i:(?P<term>{either}))(?:s|es)?(?![\w-])"
    pattern = re.compile(f"{there}|{SKIPPED}|{term}", re.DOTALL | re.MULTILINE)
    return [pattern.sub(link, text) for text in texts]


def link_glossary(notebook, address: str) -> None:
    """Link the terms in a notebook's Markdown cells, in place; `address` leads from the notebook to the glossary."""
    prose = [cell for cell in notebook.cells if cell.cell_type == "markdown"]
    glossary = GLOSSARY.read_text(encoding="utf-8")
    for cell, text in zip(prose, link_first_uses([cell.source for cell in prose], glossary, address), strict=True):
        cell.source = text

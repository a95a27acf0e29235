"""The guesses of a class, beside what was measured: `guess("about", 54)` in the cells of learners' notebooks.

No cell runs: the calls are read from the source, and the measurement from what `reveal` printed.
"""

from __future__ import annotations

import ast
import html
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from minillm.course.grading.notebook import MAX_BYTES, NotANotebook, as_dict, from_json, read_cell
from minillm.guard.inputs import as_number

BINS = 8
WIDE = 20.0  # the largest over the smallest, from which on the bins grow by a factor
MEASURED = re.compile(r"^(.+): your guess \S+, measured (-?[\d,.]+(?:e[+-]?\d+)?)", flags=re.MULTILINE)


@dataclass
class Guesses:
    """What was guessed about one thing, a number for each learner, and what they measured."""

    guessed: list[float] = field(default_factory=list)
    measured: list[float] = field(default_factory=list)


def of_class(folders: Iterable[Path]) -> dict[str, Guesses]:
    """By what they are about, the guesses in the notebooks of each learner's folder, at any depth."""
    found: dict[str, Guesses] = {}
    for folder in folders:
        guessed, measured = {}, {}
        for path in sorted(folder.glob("**/*.ipynb")):
            if path.is_file() and ".ipynb_checkpoints" not in path.parts:
                its, printed = of_notebook(path)
                guessed |= its
                measured |= printed
        for about, value in guessed.items():
            found.setdefault(about, Guesses()).guessed.append(value)
            if about in measured:
                found[about].measured.append(measured[about])
    return found


def of_notebook(path: Path) -> tuple[dict[str, float], dict[str, float]]:
    """The guesses of a notebook, and the measurements that it printed beside them; nothing of a file that is none."""
    try:
        content = from_json(path.read_bytes()) if path.stat().st_size <= MAX_BYTES else {}
    except (OSError, NotANotebook):
        return {}, {}
    cells = as_dict(content).get("cells")
    guessed, measured = {}, {}
    for raw in cells if isinstance(cells, list) else []:
        cell = read_cell(as_dict(raw))
        if cell.kind == "code":
            guessed |= dict(calls(cell.source))
            measured |= {about: float(value.replace(",", "")) for about, value in MEASURED.findall(printed(raw))}
    return guessed, measured


def calls(source: str) -> Iterator[tuple[str, float]]:
    """Each `guess("about", 54)` with a number written out; not `guess("about", None)`, nor what must be computed."""
    try:
        tree = ast.parse(re.sub(r"^[%!?].*$", "pass", source, flags=re.MULTILINE))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "guess":
            given = {**dict(zip(("about", "value"), node.args, strict=False)),
                     **{keyword.arg: keyword.value for keyword in node.keywords}}
            about, value = (literal(given.get(name)) for name in ("about", "value"))
            number = as_number(value)
            if isinstance(about, str) and number is not None and math.isfinite(number):
                yield about, number


def literal(node: ast.expr | None) -> object:
    """The value that is written there, or None."""
    try:
        return None if node is None else ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def printed(cell: object) -> str:
    """The text of a cell's outputs to the console."""
    outputs = as_dict(cell).get("outputs")
    texts = [as_dict(output).get("text", "") for output in (outputs if isinstance(outputs, list) else [])]
    return "\n".join("".join(map(str, text)) if isinstance(text, list) else str(text) for text in texts)


# -- the page -----------------------------------------------------------------------------------------------------


def histogram(values: Sequence[float], also: float | None = None) -> list[tuple[float, float, int]]:
    """Bins (from, to, how many) over all values and one more, `also`; they grow by a factor where values differ."""
    everything = [*values, *([] if also is None else [also])]
    low, high = min(everything), max(everything)
    if low == high:
        return [(low, high, len(values))]
    wide = low > 0 and high / low > WIDE
    edges = [low * (high / low) ** (i / BINS) if wide else low + (high - low) * i / BINS for i in range(BINS + 1)]
    places = [place(value, edges) for value in values]
    return [(edges[i], edges[i + 1], places.count(i)) for i in range(BINS)]


def place(value: float, edges: Sequence[float]) -> int:
    """The bin in which a value lies; the last edge belongs to the last bin."""
    return max(0, min(sum(edge <= value for edge in edges) - 1, len(edges) - 2))


def sections(found: Mapping[str, Guesses]) -> list[str]:
    """A heading and a histogram in HTML for each thing that was guessed; the bin of the measurement is marked."""
    return [section(about, its) for about, its in found.items()]


def section(about: str, its: Guesses) -> str:
    """The heading and the histogram of one thing that was guessed, as HTML."""
    measured = statistics.median(its.measured) if its.measured else None
    bins = histogram(its.guessed, measured)
    edges = [bins[0][0], *(end for _, end, _ in bins)]
    here = None if measured is None else place(measured, edges)
    most = max(number for _, _, number in bins)
    rows = [
        f'<tr><th scope="row">{start:,.3g} to {end:,.3g}</th><td class="number">{number}</td>'
        f'<td><div style="background:#0072B2;height:1em;width:{20 * number / most:.1f}rem"></div></td>'
        f"<td>{'measured' if i == here else ''}</td></tr>"
        for i, (start, end, number) in enumerate(bins)
    ]
    said = f"{len(its.guessed)} guesses, the middle one {statistics.median(its.guessed):,.4g}"
    if measured is not None:
        said += f"; measured: {measured:,.4g} (the middle of {len(its.measured)})"
    return f"<h2>{html.escape(about)}</h2><p>{said}.</p><table><tbody>\n" + "\n".join(rows) + "\n</tbody></table>"

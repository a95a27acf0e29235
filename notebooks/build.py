"""Make the notebooks from their sources: python notebooks/build.py [NAME ...]

notebooks/src/NAME.py (jupytext's percent format) becomes notebooks/NAME.ipynb, is run from
top to bottom in a fresh kernel, and is stored with its outputs. What would differ from run to run for
no reason that a reader cares about (times, ids, versions, widget state) is left out, so that
a diff of a notebook shows only what changed. The links to the glossary are put in here, so that
the sources stay easy to read.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

from minillm.course.glossary import link_glossary

FOLDER = Path(__file__).resolve().parent
SOURCES = FOLDER / "src"
# The same name on every machine, whatever the author's own kernel is called.
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
WIDGET = "application/vnd.jupyter.widget-view+json"  # holds a random id, which means nothing to another kernel


def convert(source: Path) -> NotebookNode:
    """The notebook that `source` describes, without outputs."""
    notebook = jupytext.read(source, fmt="py:percent")
    notebook.metadata = nbformat.from_dict(METADATA)
    for i, cell in enumerate(notebook.cells):
        cell.id = f"cell-{i}"  # jupytext draws a new random id each time
        cell.metadata.pop("lines_to_next_cell", None)  # jupytext's own
    link_glossary(notebook, "GLOSSARY.md")
    return notebook


def execute(notebook: NotebookNode, folder: Path, timeout: int = 1800) -> None:
    """Run every cell in `folder`, in place. Raises CellExecutionError at the first that fails."""
    NotebookClient(
        notebook,
        timeout=timeout,
        startup_timeout=600,  # a busy machine is slow to start a kernel
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        coalesce_streams=True,
    ).execute(env={**os.environ, "TQDM_DISABLE": "1"})  # a progress bar cuts the output into pieces
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [twin for output in cell.outputs if (twin := without_widget(output))]


def without_widget(output: NotebookNode) -> NotebookNode | None:
    """An output less its live widget: the static twin that a `Panel` carries, or nothing."""
    data = output.get("data", {})
    if data.pop(WIDGET, None) is None:
        return output
    data.pop("text/plain", None)  # how the widget would print
    return output if data else None


def build(source: Path) -> Path:
    notebook = convert(source)
    execute(notebook, FOLDER)
    path = FOLDER / f"{source.stem}.ipynb"
    nbformat.validate(notebook)
    nbformat.write(notebook, path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the notebooks from their sources.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="such as 01_kv_cache; without any, all of them")
    known = sorted(path.stem for path in SOURCES.glob("*.py"))
    names = parser.parse_args().names or known
    if unknown := [name for name in names if name not in known]:
        parser.error(f"no chapter {', '.join(unknown)}; known: {', '.join(known)}")
    for name in names:
        start = time.perf_counter()
        path = build(SOURCES / f"{name}.py")
        print(f"{path.name}: {time.perf_counter() - start:.0f} s, {path.stat().st_size / 1024:.0f} KB", flush=True)


if __name__ == "__main__":
    main()

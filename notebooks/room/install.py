"""Install the course from this folder, without a network: python install.py

Makes .venv here, installs minillm and JupyterLab from wheels/, puts the model into the
cache, and says how to start. Runs on any Python for which the folder holds wheels.
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
    venv.create(HERE / ".venv", with_pip=True)
    python = HERE / ".venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    wheels, model = HERE / "wheels", next((HERE / "model").glob("*.whl"))
    own = next(wheels.glob("minillm-*.whl"))
    steps = (
        ["-m", "pip", "install", "--quiet", "--no-index", "--find-links", str(wheels), f"{own}[lab]"],
        ["-m", "minillm", "fetch", "--from", str(model)],
    )
    for step in steps:
        if subprocess.run([str(python), *step]).returncode:
            print(f"This step failed: {python} {' '.join(step)}", file=sys.stderr)
            print("Most often the folder has no wheels for this Python or this system; see README.md.", file=sys.stderr)
            return 1
    print(f"Ready. Start with:  {python} -m jupyterlab {HERE} "
          "--LabApp.default_url=/lab/tree/notebooks/00_your_machine.ipynb")
    return 0


if __name__ == "__main__":
    sys.exit(main())

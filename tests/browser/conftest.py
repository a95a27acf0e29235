"""Chromium and a JupyterLab server for the browser test; what is missing is installed first."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
QUIET = [  # a browser in a closed network: nothing calls home, nothing is updated
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]


def chromium() -> str:
    """A Chromium's path: the system's own, Debian's newly installed, or else the one that Playwright brings."""
    names = ("chromium", "chromium-browser", "google-chrome")
    if found := next(filter(None, map(shutil.which, names)), None):
        return found
    if shutil.which("apt-get") and os.geteuid() == 0:
        subprocess.run(["apt-get", "update", "-qq"], check=True)
        subprocess.run(["apt-get", "install", "-y", "-qq", "chromium"], check=True, stdout=subprocess.DEVNULL)
        return shutil.which("chromium")
    subprocess.run([sys.executable, "-m", "playwright", "install", "chromium"], check=True)
    return ""  # Playwright finds its own


@pytest.fixture(scope="session")
def browser():
    from playwright.sync_api import sync_playwright

    path = chromium()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path or None, args=QUIET)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    """A JupyterLab on loopback, started as `make lab` does over a copy of the pages: a page's name to its address.

    "" is where the browser is sent first.
    """
    work = tmp_path_factory.mktemp("lab")
    for folder in ("notebooks", "exercises"):
        shutil.copytree(ROOT / folder, work / folder)
    shutil.copy(ROOT / "README.md", work)
    arguments = re.search(r"-m jupyterlab (.+)", (ROOT / "Makefile").read_text(encoding="utf-8"))[1].split()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex(8)
    settings = work / "config" / "labconfig" / "page_config.json"  # else it asks, over the page, whether to fetch news
    settings.parent.mkdir(parents=True)
    settings.write_text('{"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": true}}')
    env = os.environ | {"MINILLM_QUICK": "1", "PYTHONPATH": str(ROOT), "JUPYTER_CONFIG_DIR": str(work / "config")}
    server = subprocess.Popen(
        [sys.executable, "-m", "jupyterlab", *arguments, "--no-browser", "--allow-root", "--ip=127.0.0.1",
         f"--port={port}", f"--IdentityProvider.token={token}", "--LabApp.check_for_updates_class="
         "jupyterlab.NeverCheckForUpdate"],
        cwd=work, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}"
    for _ in range(240):
        try:
            urllib.request.urlopen(f"{address}/api?token={token}", timeout=1).read()
            break
        except OSError:
            time.sleep(0.5)
    else:
        raise RuntimeError("JupyterLab did not answer within 120 s")
    yield lambda name: f"{address}/lab/tree/{name}?token={token}&reset" if name else f"{address}/?token={token}"
    server.terminate()
    server.wait(timeout=30)

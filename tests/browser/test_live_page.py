"""The live page of `minillm serve` in a real browser: `make browser`.

A screenshot is left in tests/browser/screenshots.
"""

from __future__ import annotations

import threading
from pathlib import Path

import httpx

from minillm import Engine, load_model, load_tokenizer
from minillm.serve.app import Server
from minillm.serve.engine_thread import EngineThread
from minillm.serve.run import in_background

SCREENSHOTS = Path(__file__).parent / "screenshots"
SECONDS = 1000  # milliseconds


def figure(page, name: str) -> str:
    """What the box of this name shows."""
    return page.locator(f'.figure:has(span:text-is("{name}")) b').inner_text()


def test_the_live_page_shows_the_batch_the_blocks_and_a_server_that_is_gone(browser):
    tokenizer, failed = load_tokenizer(), []
    engine = Engine(load_model(), tokenizer, max_batch=4, max_context=512, kv_memory=90_000_000)
    page = browser.new_page(viewport={"width": 1100, "height": 900})
    page.on("pageerror", lambda error: failed.append(error))
    page.on("request", lambda asked: failed.append(asked.url) if "127.0.0.1" not in asked.url else None)
    with in_background(Server(EngineThread(engine), tokenizer, "smollm2")) as url:
        page.goto(url)
        page.wait_for_selector(".figure")
        assert figure(page, "rows of 4") == "0" and page.locator("#lost").is_hidden()

        def ask(number: int) -> None:
            body = {"prompt": f"Story {number}: once upon a time", "max_tokens": 300, "ignore_eos": True}
            httpx.post(f"{url}/v1/completions", json=body, timeout=300)

        clients = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
        for client in clients:
            client.start()
        page.wait_for_function("() => document.querySelectorAll('.row').length === 4", timeout=60 * SECONDS)
        page.wait_for_timeout(6 * SECONDS)  # so that there is a line to see
        assert figure(page, "waiting") == "2" and int(figure(page, "tokens/s")) > 0
        assert page.locator("#map").evaluate(
            "map => [...map.getContext('2d').getImageData(0, 0, map.width, 12).data].some(v => v !== 238 && v !== 0)")
        SCREENSHOTS.mkdir(exist_ok=True)
        page.screenshot(path=SCREENSHOTS / "live_page.png")
        for client in clients:
            client.join()
        page.wait_for_function("() => document.querySelectorAll('.row').length === 0", timeout=60 * SECONDS)
        assert figure(page, "finished") == "6"
    page.wait_for_selector("#lost:visible", timeout=30 * SECONDS)
    assert not failed, failed
    page.close()

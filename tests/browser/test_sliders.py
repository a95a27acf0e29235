"""A real browser in JupyterLab follows links, moves every kind of control, and sees what moves without one.

`make browser`. Not part of `make test`, since it needs a browser. Screenshots are left in tests/browser/screenshots.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCREENSHOTS = Path(__file__).parent / "screenshots"
MINUTES = 60_000  # milliseconds
PANEL = ".jp-OutputArea-output:has(.widget-slider):has(img.widget-image)"


def run_all(page) -> None:
    """Wait for the kernel, run every cell, and wait until none is left to run."""
    page.wait_for_selector('.jp-KernelName:has-text("Python 3")', timeout=2 * MINUTES)
    page.wait_for_selector('.jp-Notebook-ExecutionIndicator[data-status="idle"]', timeout=2 * MINUTES)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    page.wait_for_timeout(1000)
    page.wait_for_function(
        """() => ![...document.querySelectorAll('.jp-InputPrompt')].some(e => e.innerText.includes('*'))
              && document.querySelector('.jp-Notebook-ExecutionIndicator')?.dataset.status === 'idle'""",
        timeout=5 * MINUTES,
    )


@pytest.mark.parametrize(
    "name", ["03_continuous_batching", "04_paged_kv", "07_serving_metrics", "08_capacity", "09_latency_or_throughput"]
)
def test_a_slider_moved_by_keyboard_changes_the_picture(browser, lab, name):
    page = browser.new_page(viewport={"width": 1280, "height": 1000})
    page.goto(lab(f"notebooks/{name}.ipynb"), timeout=2 * MINUTES)
    run_all(page)
    assert not page.query_selector('[data-mime-type="application/vnd.jupyter.error"]'), "a cell failed"
    panel = page.locator(PANEL).first
    panel.scroll_into_view_if_needed(timeout=MINUTES)
    picture = panel.locator("img.widget-image")
    before = picture.get_attribute("src")
    handle = panel.locator(".noUi-handle").first
    handle.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("Tab")
    page.wait_for_function(
        "([old, selector]) => document.querySelector(selector).querySelector('img.widget-image').src !== old",
        arg=[before, PANEL], timeout=MINUTES,
    )
    page.wait_for_timeout(1000)
    page.wait_for_selector('.jp-Notebook-ExecutionIndicator[data-status="idle"]', timeout=2 * MINUTES)  # the last move
    SCREENSHOTS.mkdir(exist_ok=True)
    panel.screenshot(path=SCREENSHOTS / f"{name}.png")
    page.screenshot(path=SCREENSHOTS / f"{name}_page.png")
    page.close()


# A page with each kind of control but sliders: what its panel has, and how one is moved to another position.
KINDS = {
    "list": ("11_diagnose", ".widget-dropdown",
             lambda panel: panel.locator(".widget-dropdown select").select_option("cache prompts")),
    "buttons": ("06_speculative", ".widget-toggle-buttons",
                lambda panel: panel.locator(".widget-toggle-button:not(.mod-active)").first.click()),
    "box to tick": ("04_paged_kv", ".widget-checkbox",
                    lambda panel: panel.locator('.widget-checkbox input[type="checkbox"]').click()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_control_of_each_other_kind_changes_the_picture(browser, lab, kind):
    name, holds, move = KINDS[kind]
    page = browser.new_page(viewport={"width": 1280, "height": 1000})
    page.goto(lab(f"notebooks/{name}.ipynb"), timeout=2 * MINUTES)
    run_all(page)
    panel = page.locator(f".jp-OutputArea-output:has({holds}):has(img.widget-image)").first
    panel.scroll_into_view_if_needed(timeout=MINUTES)
    picture = panel.locator("img.widget-image")
    before = picture.get_attribute("src")
    move(panel)
    page.wait_for_function("([old, image]) => image.src !== old", arg=[before, picture.element_handle()],
                           timeout=MINUTES)
    SCREENSHOTS.mkdir(exist_ok=True)
    panel.screenshot(path=SCREENSHOTS / f"{kind.replace(' ', '_')}.png")
    page.close()


def test_the_animation_moves_on_a_page_that_was_only_opened(browser, lab):
    """No cell is run, so what is seen is what the page has stored."""
    page = browser.new_page(viewport={"width": 1280, "height": 1000})
    page.goto(lab("notebooks/04_paged_kv.ipynb"), timeout=2 * MINUTES)
    page.wait_for_selector('.jp-Notebook-ExecutionIndicator[data-status="idle"]', timeout=2 * MINUTES)
    stored = json.loads((ROOT / "notebooks/04_paged_kv.ipynb").read_text(encoding="utf-8"))
    pictures = [output["data"]["image/png"] for cell in stored["cells"] for output in cell.get("outputs", [])
                if "image/png" in output.get("data", {})]
    (moving,) = [picture for picture in pictures if b"acTL" in base64.b64decode("".join(picture))]  # an animated PNG
    animation = page.locator(f'img[src^="data:image/png;base64,{"".join(moving)[:200]}"]').first
    scroll_to(page, animation)
    seen = {animation.screenshot()}
    for _ in range(40):
        page.wait_for_timeout(250)
        seen.add(animation.screenshot())
        if len(seen) > 3:
            break
    assert len(seen) > 3, "it stands still"
    SCREENSHOTS.mkdir(exist_ok=True)
    animation.screenshot(path=SCREENSHOTS / "animation.png")
    page.close()


def scroll_to(page, thing) -> None:
    """Turn the wheel until it is there (cells are rendered as they come into view), and show it."""
    page.mouse.move(640, 500)
    for _ in range(300):
        if thing.count():
            break
        page.mouse.wheel(0, 1000)
        page.wait_for_timeout(200)
    thing.scroll_into_view_if_needed(timeout=MINUTES)


def test_the_course_opens_on_its_first_page(browser, lab):
    page = browser.new_page()
    page.goto(lab(""), timeout=2 * MINUTES)
    page.wait_for_selector('.jp-mod-current .lm-TabBar-tabLabel:has-text("00_your_machine.ipynb")', timeout=2 * MINUTES)
    page.close()


@pytest.mark.parametrize(
    ("start", "target"),
    [
        ("notebooks/00_your_machine.ipynb", "notebooks/01_decode_loop.ipynb"),
        ("notebooks/00_your_machine.ipynb", "notebooks/CLAIMS.md"),
        ("notebooks/00_your_machine.ipynb", "exercises/01_step_cost.ipynb"),
        ("exercises/01_step_cost.ipynb", "notebooks/01_decode_loop.ipynb"),
    ],
)
def test_a_link_of_each_kind_opens_what_it_names(browser, lab, start, target):
    page = browser.new_page(viewport={"width": 1280, "height": 1000})
    page.goto(lab(start), timeout=2 * MINUTES)
    page.wait_for_selector('.jp-Notebook-ExecutionIndicator[data-status="idle"]', timeout=2 * MINUTES)
    link = page.locator(f'.jp-RenderedMarkdown a[href*="/files/{target}"]').first
    scroll_to(page, link)
    link.click()
    name = Path(target).name
    page.wait_for_selector(f'.lm-TabBar-tab.jp-mod-current .lm-TabBar-tabLabel:has-text("{name}")', timeout=MINUTES)
    page.wait_for_selector(".lm-DockPanel-widget:not(.lm-mod-hidden) :is(.jp-Notebook, .jp-FileEditor, "
                           ".jp-MarkdownViewer)", timeout=MINUTES)
    assert not page.query_selector(".jp-Dialog"), "it says that the file cannot be opened"
    page.close()

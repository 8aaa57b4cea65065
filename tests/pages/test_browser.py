"""The whole story in a real browser on the real model: run, click the worst head, edit, save, export, load.

Also takes the screenshots of every page, wide and narrow, light and dark, into tests/screenshots (not in git).
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headscope.engine.base.places import ROOT
from headscope.engine.config.file import HeadConfig
from headscope.engine.loss.measure import measure_patterns
from headscope.engine.patterns.families import BlockSparse
from headscope.engine.runs.capture import Capture
from headscope.studio.base import words

pytestmark = [pytest.mark.browser, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(1500)]

playwright = pytest.importorskip("playwright.sync_api")

SHOTS = Path(__file__).parents[1] / "screenshots"
CHROMIUM = next(
    (p for p in ("/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome") if os.path.exists(p)), None
)
SAMPLE = "key_value"
LOSSY = (12, 2)
"""A layer and a head that lose much on this sample under the starting config."""

PATIENCE = 600_000
"""Milliseconds to wait for work of the model; CI machines are slow and busy."""


class Studio:
    """A server of its own on a free port, with its data in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.log = folder / "server.log"
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        environment = os.environ | {
            "HEADSCOPE_DB": str(self.folder / "studio.duckdb"),
            "HEADSCOPE_CAPTURES": str(self.folder / "captures"),
        }
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "headscope.studio.serve.server", str(self.port)],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        for _ in range(240):
            try:
                with urllib.request.urlopen(f"{self.url}/_stcore/health", timeout=2) as answer:
                    if answer.status == 200:
                        return
            except OSError:
                time.sleep(0.5)
        raise AssertionError(self.log.read_text())

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=30)


@pytest.fixture(scope="module")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Studio]:
    made = Studio(tmp_path_factory.mktemp("studio"))
    yield made
    made.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("needs chromium")
    with playwright.sync_playwright() as run:
        chromium = run.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-background-networking"]
        )
        yield chromium
        chromium.close()


DRAWN = "[...document.querySelectorAll('[data-testid=stPlotlyChart]')].every(one => one.querySelector('.main-svg'))"
"""JavaScript: every figure has been drawn."""


def open_page(browser: Any, url: str, width: int = 1440, height: int = 900, scheme: str = "light") -> Any:
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page = context.new_page()
    page.set_default_timeout(90_000)
    page.goto(url)
    page.get_by_test_id("stMain").wait_for()
    return page


def settle(page: Any, pause: int = 500) -> None:
    """Waits until the script has run and nothing is stale."""
    page.wait_for_timeout(pause)
    for _ in range(600):
        running = page.locator('[data-testid="stApp"][data-test-script-state="running"]').count()
        waiting = page.locator('[data-stale="true"], [data-testid="stSkeleton"]').count()
        if not running and not waiting and page.evaluate(DRAWN):
            break
        page.wait_for_timeout(100)
    page.wait_for_timeout(300)


FIND = (
    "const plot = [...document.querySelectorAll('.js-plotly-plot')]"
    ".find(one => one.data.some(trace => trace.name === 'cells'))"
)
"""JavaScript that finds the overview."""


def click_cell(page: Any, layer: int, head: int) -> None:
    """A real click on one cell of the overview, found through plotly's own axes."""
    page.evaluate(f"() => {{ {FIND}; plot.scrollIntoView({{block: 'center'}}); }}")
    page.wait_for_timeout(300)
    place = page.evaluate(
        f"""([layer, head]) => {{
            {FIND};
            const area = plot.querySelector('.nsewdrag').getBoundingClientRect();
            const full = plot._fullLayout;
            return [area.left + full.xaxis.d2p(head), area.top + full.yaxis.d2p(layer)];
        }}""",
        [layer, head],
    )
    page.mouse.move(*place)
    page.mouse.click(*place)


def metric(page: Any, label: str) -> str:
    card = page.get_by_test_id("stMetric").filter(has_text=label).first
    return card.get_by_test_id("stMetricValue").inner_text().replace("\u00a0", " ").strip()


def shoot(browser: Any, url: str, name: str) -> None:
    """One page in both widths and both modes; figures must be drawn and nothing may be wider than the page."""
    SHOTS.mkdir(exist_ok=True)
    for width in (1440, 420):
        for scheme in ("light", "dark"):
            page = open_page(browser, url, width, scheme=scheme)
            settle(page, 1500)
            height = page.evaluate("document.querySelector('[data-testid=stMain]').scrollHeight")
            if width == 1440:
                page.screenshot(path=str(SHOTS / f"{name}-{width}x900-{scheme}.png"))
            page.set_viewport_size({"width": width, "height": min(max(900, height + 40), 7000)})
            settle(page, 700)
            page.screenshot(path=str(SHOTS / f"{name}-{width}-{scheme}.png"))
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, f"{name} is {wide} px wide in {width}"
            assert not page.get_by_text("Traceback").count()
            page.context.close()


def test_the_whole_story(studio: Studio, browser: Any, tmp_path: Path) -> None:
    shoot(browser, studio.url, "first")
    # A link names a shorter sample than the first one, so that the test takes less long.
    page = open_page(browser, f"{studio.url}/?prompt={SAMPLE}")
    settle(page)
    page.get_by_role("button", name="Run", exact=True).click()
    # A reload in mid-run finds the run under way.
    page.get_by_role("button", name="Cancel").wait_for()
    page.reload()
    page.get_by_role("button", name="Cancel").wait_for()
    page.get_by_text("More about this head").wait_for(timeout=PATIENCE)
    settle(page)

    # The result opens on the worst head; a click on another cell leads to that one.
    worst = re.search(r"Layer (\d+) · Head (\d+)", page.get_by_test_id("stHeading").first.inner_text())
    assert worst is not None
    layer, head = 11, 4
    click_cell(page, layer, head)
    page.get_by_role("heading", name=f"Layer {layer} · Head {head}").wait_for()
    settle(page)
    layer, head = LOSSY
    click_cell(page, layer, head)
    page.get_by_role("heading", name=f"Layer {layer} · Head {head}").wait_for()
    settle(page)
    assert f"layer={layer}" in page.url and f"head={head}" in page.url
    overview_link = page.url
    shoot(browser, overview_link, "heads")

    # Three successive edits on the tune page, then away and back.
    page.get_by_role("link", name="Tune").click()
    page.get_by_text("Does the answer survive?").wait_for()
    settle(page)
    before = metric(page, "misses, mean")
    page.get_by_role("radio", name="block-sparse").or_(page.get_by_role("button", name="block-sparse")).first.click()
    label = page.get_by_text(re.compile(r"block-sparse \d+ × 64")).first
    label.wait_for()
    settle(page)
    offered = re.search(r"block-sparse (\d+) × 64", label.inner_text())
    assert offered is not None
    blocks = int(offered.group(1)) + 2
    for wanted in (blocks - 1, blocks):
        page.get_by_test_id("stNumberInputStepUp").first.click()
        page.get_by_text(re.compile(rf"block-sparse {wanted} × 64")).first.wait_for()
        settle(page)
    page.get_by_role("link", name="Heads").click()
    page.get_by_text("More about this head").wait_for()
    settle(page)
    page.get_by_role("link", name="Tune").click()
    page.get_by_text(re.compile(rf"block-sparse {blocks} × 64")).first.wait_for()
    settle(page)
    shown = {
        name: metric(page, label)
        for name, label in (("mean", "misses, mean"), ("worst", "worst row"), ("density", "computes, of causal pairs"))
    }
    assert shown["mean"] != before
    shoot(browser, page.url, "tune")

    # The whole model with the draft.
    page.get_by_role("button", name="Run the model with this draft").click()
    page.get_by_text("The next-token distribution").or_(
        page.get_by_text("next-token distribution moved")
    ).first.wait_for(timeout=PATIENCE)
    settle(page)
    assert metric(page, "next-token KL").endswith("nats")

    # Save, check the export, take it home.
    page.get_by_role("link", name="Configs").click()
    page.get_by_label("Name of the version").fill("worst head, wider")
    page.get_by_label("Name of the version").press("Tab")
    settle(page)
    page.get_by_role("button", name="Save version").click()
    page.get_by_text("Saved as version 1").wait_for()
    settle(page)
    page.get_by_role("button", name="Check the export").click()
    take = page.get_by_role("button", name="Download the config")
    take.wait_for(timeout=PATIENCE)
    settle(page)
    with page.expect_download() as saved:
        take.click()
    path = tmp_path / "config.json"
    saved.value.save_as(path)
    shoot(browser, page.url, "configs")

    # The engine alone, from the file and the stored capture: number for number what the page showed.
    config = HeadConfig.load(path)
    assert config.patterns(layer)[head] == BlockSparse(blocks)
    run_id = re.search(r"run=([a-f0-9]{12})", page.url).group(1)
    capture = Capture.load(studio.folder / "captures" / run_id)
    result = measure_patterns(capture.layer(layer), config.patterns(layer), layer=layer, estimator=config.estimator)
    again = result.heads[head]
    evidence = config.heads[layer][head].evidence
    assert again.missed_mass_mean == pytest.approx(evidence["missed_mass_mean"], abs=1e-5)
    assert again.computed_pairs == evidence["computed_pairs"]
    for name, value in (
        ("mean", again.missed_mass_mean),
        ("worst", again.missed_mass_worst),
        ("density", again.computed_density),
    ):
        assert words.percent(value).replace("\u00a0", " ") == shown[name], name
    for other, entry in enumerate(config.heads[layer]):
        assert result.heads[other].missed_mass_mean == pytest.approx(entry.evidence["missed_mass_mean"], abs=1e-5)

    # A restart of the server finds run, capture, draft and version without a new prefill.
    studio.stop()
    studio.start()
    link = overview_link.split("?")[1]
    page = open_page(browser, f"{studio.url}/tune?{link}")
    page.get_by_text(re.compile(rf"block-sparse {blocks} × 64")).first.wait_for()
    settle(page)
    assert metric(page, "misses, mean") == shown["mean"]
    page.get_by_role("link", name="Configs").click()
    page.get_by_role("heading", name="Version 1").wait_for()
    page.context.close()

    # Nothing of the prompt is in the server's log, and no figure was above 2 MB (checked in test_charts).
    text = (ROOT / "sample_prompts" / f"{SAMPLE}.txt").read_text("utf-8")
    log = studio.log.read_text("utf-8")
    assert "Traceback" not in log
    assert not any(line.strip() in log for line in text.splitlines() if len(line.strip()) > 20)


def test_a_prompt_of_markup_is_not_interpreted(studio: Studio, browser: Any) -> None:
    page = open_page(browser, studio.url)
    fired: list[str] = []
    page.on("dialog", lambda dialog: (fired.append(dialog.message), dialog.dismiss()))
    page.get_by_text("Paste", exact=True).click()
    settle(page)
    nasty = '<img src=x onerror="alert(1)"> **bold** [link](http://127.0.0.1/) :material/home: $x^2$ <b>tag</b>\n' * 12
    page.get_by_placeholder("Paste a prompt").fill(nasty)
    page.get_by_placeholder("Paste a prompt").press("Control+Enter")
    settle(page)
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_text("More about this head").wait_for(timeout=PATIENCE)
    settle(page)
    assert not fired
    assert page.locator("img[src='x']").count() == 0
    assert page.locator("[data-testid=stMain] a[href='http://127.0.0.1/']").count() == 0
    page.context.close()


def test_an_upload_of_fifty_megabytes_is_refused_in_one_sentence(studio: Studio, browser: Any, tmp_path: Path) -> None:
    large = tmp_path / "large.txt"
    large.write_bytes(b"a " * (25 * 2**20))
    page = open_page(browser, studio.url)
    page.get_by_text("Upload", exact=True).first.click()
    settle(page)
    page.locator("input[type=file]").first.set_input_files(str(large))
    page.get_by_text(re.compile("must be 8.*or smaller|exceeds|too large", re.I)).first.wait_for()
    assert page.get_by_role("button", name="Run", exact=True).is_disabled()
    page.context.close()


@pytest.mark.parametrize("name", ["heads", "tune", "search", "configs", "learn"])
def test_pages_by_their_names(studio: Studio, browser: Any, name: str) -> None:
    """Each page at the address of its name, with what the address says of it."""
    page = open_page(browser, f"{studio.url}/{name}?prompt=key_value")
    page.get_by_test_id("stTopNavLink").first.wait_for()
    settle(page)
    assert page.get_by_text("Page not found").count() == 0
    assert page.get_by_test_id("stTopNavLink").count() == 5
    assert page.title() == f"{name.capitalize()} · headscope"
    assert "prompt=key_value" in page.url, page.url
    page.context.close()


def test_a_second_studio_on_the_same_file_says_so(studio: Studio, browser: Any) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    second = Studio.__new__(Studio)
    second.folder, second.port, second.log = studio.folder, port, studio.folder / "second.log"
    second.start()
    try:
        page = open_page(browser, second.url)
        page.get_by_text("Another headscope has studio.duckdb open").wait_for()
        page.context.close()
    finally:
        second.stop()

"""Tests of the page in a headless browser: no console messages, no overlapping or cut labels."""

import glob
import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hfq.plots.documents import write_report

pytestmark = pytest.mark.slow
pytest.importorskip("matplotlib", reason="matplotlib is not installed")

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
DOCS = Path(__file__).parents[2] / "docs"

LAYOUT = """<script>
const found = [];
const width = document.documentElement;
if (width.scrollWidth > width.clientWidth) found.push(`the page is ${width.scrollWidth} wide in ${width.clientWidth}`);
for (const svg of document.querySelectorAll("svg")) {
  const frame = svg.getBoundingClientRect();
  if (frame.width < 200 || frame.height < 100) found.push(`${svg.getAttribute("aria-label")}: ${frame.width} x ${frame.height}`);
  const labels = [...svg.querySelectorAll("text")].map(text => ({text, box: text.getBoundingClientRect()}));
  for (const {text, box} of labels)
    if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1 || box.bottom > frame.bottom + 1)
      found.push(`cut off: ${text.textContent}`);
  const level = labels.filter(({text}) => !/rotate\\(-(?!0\\b)/.test(text.getAttribute("transform") ?? ""));
  for (const [place, one] of level.entries())
    for (const other of level.slice(place + 1))
      if (Math.min(one.box.right, other.box.right) - Math.max(one.box.left, other.box.left) > 1 &&
          Math.min(one.box.bottom, other.box.bottom) - Math.max(one.box.top, other.box.top) > 3)
        found.push(`one over the other: ${one.text.textContent} and ${other.text.textContent}`);
}
document.documentElement.dataset.found = JSON.stringify(found);
document.documentElement.dataset.texts = document.querySelectorAll("svg text").length;
</script>"""


@pytest.fixture(scope="module")
def browse(tmp_path_factory):
    """browse(page, *options) → the browser's standard output, and all console messages of the page."""
    cached = glob.glob(os.path.expanduser("~/.cache/ms-playwright/chromium*/chrome-linux*/*"))
    known = [shutil.which(name) for name in NAMES] + [
        file for file in cached if file.endswith(("/chrome", "/headless_shell"))
    ]
    browser = os.environ.get("HFQ_BROWSER") or next((file for file in known if file), None)
    if browser is None:
        pytest.skip(f"no browser here ({', '.join(NAMES)}, playwright's chromium, or $HFQ_BROWSER)")
    profile = tmp_path_factory.mktemp("profile")

    def browse(page, *options):
        command = [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--enable-logging=stderr",
            "--v=0",
            f"--user-data-dir={profile}",
            *options,
            page.as_uri(),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]

    return browse


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Page with the documentation's examples and every kind of plan."""
    from tests.plots.conftest import BENCH, RESULTS

    folder = tmp_path_factory.mktemp("page")
    groups = ["one row", "eight rows", "one hundred and twenty-eight rows", "512"]
    series = {f"dialect number {n}": [0.123 * n, 12.3, None, 123.4 / (n + 1)] for n in range(13)}
    many = BENCH | {"chart": BENCH["chart"] | {"groups": groups, "series": series}}
    files = [
        DOCS / "pictures" / "run.json",
        DOCS / "benchmarks" / "load.json",
        DOCS / "benchmarks" / "stream.json",
    ]
    for kind, value in (RESULTS | {"many": many}).items():
        files.append(folder / f"{kind}.json")
        files[-1].write_text(json.dumps(value))
    return write_report(files, folder, as_page=True)[-1]


def test_nothing_is_said_on_the_console_and_the_page_is_shown_in_both_schemes(page, browse, tmp_path):
    import matplotlib.image

    backgrounds = []
    for scheme in ("light", "dark"):
        shot = tmp_path / f"{scheme}.png"
        dark = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
        _, messages = browse(page, f"--screenshot={shot}", "--window-size=1300,3000", *dark)
        assert messages == []
        pixels = matplotlib.image.imread(shot)[..., :3]
        backgrounds.append(float(pixels[-1, -1].mean()))
        assert pixels.shape[:2] == (3000, 1300)
        assert (
            abs(pixels - pixels[-1, -1]).max(axis=2) > 0.3
        ).mean() > 0.03  # text and pictures stand out from the background
    assert backgrounds[0] > 0.95
    assert backgrounds[1] < 0.15


@pytest.mark.parametrize("width", [1300, 700])
def test_no_label_is_cut_off_or_lies_over_another(width, page, browse, tmp_path):
    text = re.sub(
        r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text(encoding="utf-8")
    )  # it forbids scripts
    probe = tmp_path / "probe.html"
    probe.write_text(text.replace("</body>", f"{LAYOUT}</body>"), encoding="utf-8")
    dom, messages = browse(probe, "--dump-dom", f"--window-size={width},3000")
    assert messages == []
    assert int(re.search(r'data-texts="(\d+)"', dom)[1]) > 100
    assert json.loads(html.unescape(re.search(r'data-found="([^"]*)"', dom)[1])) == []


def test_the_policy_lets_no_script_run(page, browse, tmp_path):
    probe = tmp_path / "script.html"
    probe.write_text(
        page.read_text(encoding="utf-8").replace("</body>", "<script>document.title = 'ran'</script></body>")
    )
    dom, messages = browse(probe, "--dump-dom")
    assert "<title>hfq plot</title>" in dom
    assert any(
        "Content Security Policy" in message for message in messages
    )  # and messages are seen by this test

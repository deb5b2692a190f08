"""The page of `lkv inspect` in a browser: a known selection and its tiers, at two widths, light and dark."""

import shutil

import numpy as np
import pytest

from lkv.context.inspection import InspectionResult, render_page
from lkv.methods.targets import UNQUANTIZED, KVShape, Precision

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="there is no chromium here")]

# Four tokens, one layer of two heads of 8 channels in float32. At 10% head 0 has token 2 in 8 bits and token 0 in 4.
RESULT = InspectionResult(
    method="lkv",
    pieces=["one ", "two ", "three ", "four"],
    ranks=np.array([[1, 0], [2, 1], [0, 2], [3, 3]], np.uint16),
    counts=np.array([[[0, 0], [1, 0], [2, 1]], [[4, 4], [4, 4], [4, 4]]]),
    shares=(0.1, 1.0),
    by_memory=True,
    precisions=(UNQUANTIZED, Precision(8, 8), Precision(4, 4)),
    layers=1,
    heads=2,
    shape=KVShape(2, 8, 4),
)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_a_head_shows_what_it_keeps_in_which_precision(tmp_path, width, scheme):
    (tmp_path / "page.html").write_text(render_page(RESULT, "log.txt", "tiny", 0.1, {}), encoding="utf-8")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto((tmp_path / "page.html").as_uri())
        assert page.inner_text("#title") == "log.txt: what LKV keeps of 4 tokens (tiny)"
        assert page.inner_text("#share") == "10% of the bytes" and page.is_hidden("#tiers")
        assert "38% of the KV entries kept: 13% in 8 bits, 25% in 4 bits" in page.inner_text("#held")
        page.click('[data-h="0"]')
        assert page.inner_text("#tiers").split() == ["8", "bits", "4", "bits", "evicted"]
        assert page.eval_on_selector_all("#text span", "all => all.map((one) => one.className)") == [
            "l5", "l0", "l10", "l0",
        ]  # fmt: skip
        page.fill("#slider", "1")
        page.wait_for_selector("#share:text('100% of the bytes')")
        assert "100% of the KV entries kept: 100% in full precision" in page.inner_text("#held")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth") and problems == []
        browser.close()

"""The server's page, driven in a browser as a reader would, at two widths, light and dark."""

import shutil

import pytest

from tests.serving.server import OTHER, TEXT, serving

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="there is no chromium here")]
# The lightest text of the page that is seen, against what is behind it (WCAG 2): 21 for black on white.
CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (color, under) => {
    canvas.fillStyle = under; canvas.fillRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const text = (parts) => `rgb(${parts.join(",")})`;
  const light = (parts) => parts.map((x) => x / 255).map((x) => x <= .04045 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4)
    .reduce((sum, x, i) => sum + x * [.2126, .7152, .0722][i], 0);
  const paper = document.createElement("div");
  paper.style.backgroundColor = "Canvas";
  document.body.append(paper);
  let under = text(rgb(getComputedStyle(paper).backgroundColor, "white"));
  paper.remove();
  const found = [];
  for (const one of document.querySelectorAll("h1, h2, p, label, button, textarea, input, select, summary")) {
    if (!one.checkVisibility() || one.disabled) continue;
    let behind = under, opacity = 1;
    const chain = [];
    for (let each = one; each; each = each.parentElement) chain.unshift(getComputedStyle(each));
    for (const style of chain) { behind = text(rgb(style.backgroundColor, behind)); opacity *= style.opacity; }
    const front = rgb(getComputedStyle(one).color, behind), back = rgb(behind, behind);
    const mixed = front.map((x, i) => opacity * x + (1 - opacity) * back[i]);
    const [a, b] = [light(mixed), light(back)].sort((x, y) => y - x);
    found.push([(a + .05) / (b + .05), one.id || one.textContent.slice(0, 20)]);
  }
  return found.sort((x, y) => x[0] - y[0])[0];
}"""


@pytest.fixture(scope="module")
def browser():
    """A browser without a window."""
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


def open_page(browser, url, width, scheme):
    """The page, and what goes wrong on it."""
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page.set_default_timeout(60_000)
    problems = []
    page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(url)
    return page, problems


def compress(page, text):
    """Compress a text on the page; the context's id."""
    page.select_option("#contexts", "")
    page.fill("#text", text)
    page.click("#compress")
    page.wait_for_selector("#sizes:not([hidden])")
    assert " before, " in page.inner_text("#bytes")
    return page.input_value("#contexts")


def ask(page, question):
    """Ask a question on the page, and wait for its whole answer."""
    page.fill("#question", question)
    with page.expect_response("**/v1/chat/completions"):
        page.press("#question", "Enter")
    page.wait_for_selector("#ask:not([disabled])")
    return page.text_content("#small")


def looks_right(page):
    """Nothing is wider than the window, and every text can be read."""
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    contrast, where = page.evaluate(CONTRAST)
    assert contrast >= 4.5, (contrast, where)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_a_text_is_compressed_asked_and_deleted(server, browser, width, scheme):
    page, problems = open_page(browser, server.url, width, scheme)
    looks_right(page)
    name = compress(page, f"{TEXT} At {width} and {scheme}.")
    assert ask(page, "Who?") == server.answer("Who?", name, max_tokens=256)
    assert " tokens in " in page.inner_text("#small-note")
    looks_right(page)
    page.check("#both")
    ask(page, "How many?")
    assert " tokens in " in page.inner_text("#full-note") and page.text_content("#full")
    looks_right(page)
    page.click("#remove")
    page.wait_for_selector("#new:not([hidden])")
    assert server.ask(f"/v1/contexts/{name}")[0] == 404
    assert page.inner_text("#problem") == "" and problems == []
    page.close()


def test_what_the_server_refuses_is_shown(server, browser):
    page, _ = open_page(browser, server.url, 390, "light")
    page.click("#compress")
    page.wait_for_selector("#problem:has-text('the text is empty')")
    looks_right(page)
    name = compress(page, OTHER)
    page.check("#both")
    server.ask(f"/v1/contexts/{name}", method="DELETE")
    ask(page, "Who?")
    assert "there is no context" in page.inner_text("#problem")
    page.close()


def test_a_key_is_asked_for_and_used(parts, browser, tmp_path):
    with serving(*parts, tmp_path, key="sesame") as server:
        page, _ = open_page(browser, server.url, 1280, "light")
        page.wait_for_selector("#problem:has-text('the key is missing')")
        page.click("summary")
        page.fill("#key", "sesame")
        page.press("#key", "Tab")
        name = compress(page, TEXT)
        assert ask(page, "Who?") == server.answer("Who?", name, max_tokens=256)
        page.close()

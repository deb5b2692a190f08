"""The server's page in a browser: two widths, light and dark, the keyboard alone, and axe-core."""

import shutil

import pytest

from lkv.context.document_reader import parse_document
from tests.serving.server import OTHER, TEXT, serving

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="there is no chromium here")]
# What has the focus, and whether that is seen.
FOCUS = """() => {
  const one = document.activeElement, { outlineStyle, outlineWidth } = getComputedStyle(one);
  return [one.id || one.tagName, one === document.body || outlineStyle === "solid" && parseInt(outlineWidth) >= 2];
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
    """Nothing is wider than the window, and axe-core finds nothing wrong."""
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    found = axe.Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


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
    assert name in (kept := [each["id"] for each in server.ask("/v1/contexts")[1]["data"]])
    assert len({each.partition("-")[0] for each in kept}) == len(kept)  # the full cache is not kept
    looks_right(page)
    page.click("#remove")
    page.wait_for_selector("#new:not([hidden])")
    assert server.ask(f"/v1/contexts/{name}")[0] == 404
    assert page.inner_text("#problem") == "" and problems == []
    page.close()


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_is_used_by_keyboard_alone(server, browser, width):
    page, problems = open_page(browser, server.url, width, "light")

    def tab_to(last):
        """Press Tab up to a part of the page; what had the focus on the way."""
        names = []
        while (names or [""])[-1] != last:
            page.keyboard.press("Tab")
            name, is_seen = page.evaluate(FOCUS)
            assert is_seen and len(names) < 9, (names, name)
            names.append(name)
        return names

    assert tab_to("text") == ["contexts", "text"]
    page.keyboard.type(f"{TEXT} By keyboard at {width}.")
    assert tab_to("compress") == ["file", "memory", "compress"]
    page.keyboard.press("Enter")
    page.wait_for_selector("#sizes:not([hidden])")
    page.wait_for_selector("#question:focus")
    page.keyboard.type("Who?")
    assert tab_to("both") == ["ask", "both"]
    page.keyboard.press("Space")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    page.wait_for_selector("#full-note:has-text(' tokens in ')")
    page.wait_for_selector("#question:focus")
    for before in ("remove", "contexts"):
        page.keyboard.press("Shift+Tab")
        assert page.evaluate(FOCUS) == [before, True]
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_selector("#new:not([hidden])")
    page.wait_for_selector("#contexts:focus")
    tab_to("compress")
    page.keyboard.press("Enter")
    page.wait_for_selector("#problem:has-text('the text is empty')")
    page.wait_for_selector("#compress:focus")
    assert len(problems) == 1  # the console's line of the refused request
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


def test_documents_are_read_by_the_server(server, browser):
    page, problems = open_page(browser, server.url, 390, "dark")
    source = f"<!doctype html><title>Lisse</title><script>1</script><p>{TEXT}</p>"
    page.set_input_files("#file", {"name": "a.html", "mimeType": "text/html", "buffer": source.encode()})
    page.click("#compress")
    page.wait_for_selector("#sizes:not([hidden])")
    document = parse_document(source.encode(), "a.html")
    assert f"Not read: {'; '.join(document.skipped)}." in page.inner_text("#bytes")
    assert page.input_value("#contexts") == server.compressed(document.text, memory=0.1)
    looks_right(page)
    assert problems == []
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_a_key_is_asked_for_and_used(parts, browser, tmp_path, width, scheme):
    with serving(*parts, tmp_path, key="sesame") as server:
        page, _ = open_page(browser, server.url, width, scheme)
        page.wait_for_selector("#key:focus")
        assert page.inner_text("#problem") == ""
        looks_right(page)
        page.keyboard.type("guess\n")
        page.wait_for_selector("#problem:has-text('the key is missing or wrong')")
        page.fill("#key", "sesame")
        page.keyboard.press("Enter")
        page.wait_for_selector("#access", state="hidden")
        assert page.inner_text("#problem") == ""
        name = compress(page, TEXT)
        assert ask(page, "Who?") == server.answer("Who?", name, max_tokens=256)
        page.close()

"""The server's page: its parts by name, and its script, run by Node.js without a browser."""

import json
import re
import shutil
import subprocess

import pytest
from selectolax.lexbor import LexborHTMLParser

from lkv.serving.routes import page_response

NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="there is no Node.js")
# Elements that take everything, and a server: `log` has the requests in order and the ends of answers. The full cache
# takes one look at its progress; the answer of `wait` stays open until it is aborted; `key` is what the server wants.
PAGE = """
const elements = {}, log = [], server = { wait: "", key: "", full: "compressing" };
globalThis.document = { getElementById: (id) => elements[id] ??= {
  value: "", textContent: "", checked: false, hidden: true, files: [], dataset: {}, style: {},
  replaceChildren() {}, add() {}, focus() { document.activeElement = id; },
} };
globalThis.Option = class {};
const json = (content, status = 200) => new Response(JSON.stringify(content), { status });
const sizes = { tokens: 9, bytes: 1, full_bytes: 10, realised_retention: 1 };
const context = (id, status = "ready") => json({ id, status, ...sizes });
globalThis.fetch = async (path, { method = "GET", body, signal, headers } = {}) => {
  signal?.throwIfAborted();
  if (server.key && headers.Authorization !== "Bearer " + server.key) return json({ error: "Unauthorized" }, 401);
  const name = path.split("/").pop();
  if (path === "/v1/chat/completions") {
    const asked = JSON.parse(body).context;
    log.push("ask " + asked);
    return new Response(new ReadableStream({ async start(stream) {
      if (server.wait === asked) {
        signal.addEventListener("abort", () => { log.push("aborted " + asked); stream.error(signal.reason); });
        return;
      }
      await new Promise((done) => setTimeout(done, 50));
      const choices = [{ delta: { content: "41" } }], usage = { completion_tokens: 1 };
      for (const part of [{ choices }, { choices: [], usage }]) {
        stream.enqueue("data: " + JSON.stringify(part) + "\\n\\n");
      }
      log.push("end " + asked);
      stream.close();
    } }).pipeThrough(new TextEncoderStream()));
  }
  if (method === "POST") {
    log.push("make " + body);
    const isFull = typeof body === "string" && JSON.parse(body).retention === 1;
    return isFull ? context("full", server.full) : context("small");
  }
  if (method === "DELETE") log.push("delete " + name);
  return path === "/v1/contexts" ? json({ data: [] }) : context(name);
};
const at = document.getElementById;
const event = { preventDefault() {} };
const ask = () => { at("question").value = "Who?"; return at("form").onsubmit(event); };
const compare = async () => {
  at("text").value = "A text.";
  await at("compress").onclick();
  log.length = 0;
  at("contexts").value = "small";
  at("both").checked = true;
};
const until = async (line) => { while (!log.includes(line)) await new Promise((done) => setTimeout(done, 5)); };
"""


def source():
    """The page."""
    return page_response().body.decode()


def run(steps, before=""):
    """What `steps` after the page's own script give; `before` comes before both."""
    script = source().partition("<script>")[2].partition("</script>")[0]
    code = f"{PAGE}{before}new Function({json.dumps(script)})();\n(async () => {{ {steps} }})().then((found) => " + (
        "{ console.log(JSON.stringify(found)); process.exit(0); });"
    )
    done = subprocess.run([NODE, "-"], input=code, capture_output=True, text=True, timeout=30, check=True)
    return json.loads(done.stdout)


def test_every_part_has_a_name_and_a_place():
    page = LexborHTMLParser(source())
    assert page.css_first("html").attributes["lang"] == "en" and len(page.css("main")) == 1
    parts = page.css("input, select, textarea, button, progress")
    assert len(parts) >= 12
    for part in parts:
        label = part.parent if part.parent.tag == "label" else part
        assert part.attributes.get("aria-label") or label.text(strip=True), part.html
    outside = [node for node in page.css("body *") if node.tag not in ("main", "script") and not inside_main(node)]
    assert outside == []
    ids = {node.attributes["id"] for node in page.css("[id]")}
    assert set(re.findall(r'\bat\("([\w-]+)"\)', source())) <= ids


def inside_main(node):
    """Whether one of the elements around `node` is the main part."""
    return node.parent is not None and (node.parent.tag == "main" or inside_main(node.parent))


@needs_node
def test_compare_asks_one_cache_after_the_other_and_deletes_the_full_one():
    found = run("""
      await compare();
      await ask();
      return [log, at("small").textContent, at("full").textContent, at("problem").textContent, at("ask").disabled];
    """)
    made = 'make {"text":"A text.","retention":1}'
    log = ["ask small", "end small", made, "ask full", "end full", "delete full"]
    assert found == [log, "41", "41", "", False]


@needs_node
def test_compare_leaves_a_full_cache_that_was_there_before():
    found = run("""
      server.full = "ready";
      await compare();
      await ask();
      return log.slice(-2);
    """)
    assert found == ["ask full", "end full"]


@needs_node
def test_an_error_ends_a_comparison_and_the_next_answers_are_alone():
    found = run("""
      await compare();
      at("key").value = "guess";
      server.key = "sesame";
      await ask();
      const refused = [[...log], at("ask").disabled];
      server.key = "";
      await ask();
      return [refused, log, at("full").textContent, at("problem").textContent];
    """)
    made = 'make {"text":"A text.","retention":1}'
    log = ["ask small", "end small", made, "ask full", "end full", "delete full"]
    assert found == [[[], False], log, "41", ""]


@needs_node
def test_a_stopped_comparison_deletes_the_full_cache():
    found = run("""
      await compare();
      const ends = [];
      for (server.wait of ["full", "small"]) {
        log.length = 0;
        const asked = ask();
        await until("ask " + server.wait);
        at("stop").onclick();
        await asked;
        ends.push([log.slice(-2), at("problem").textContent, at("ask").disabled]);
      }
      return ends;
    """)
    assert found == [[["aborted full", "delete full"], "", False], [["ask small", "aborted small"], "", False]]


@needs_node
def test_a_server_with_a_key_shows_its_field_and_an_error_only_for_a_wrong_key():
    found = run(
        """
      const seen = [], look = () => seen.push([at("access").hidden, at("problem").textContent, document.activeElement]);
      await new Promise((done) => setTimeout(done, 20));
      look();
      for (at("key").value of ["guess", "sesame"]) { await at("access").onsubmit(event); look(); }
      return seen;
    """,
        'server.key = "sesame";',
    )
    assert found == [[False, "", "key"], [False, "Unauthorized", "key"], [True, "", "contexts"]]


@needs_node
def test_names_are_cut_between_characters_and_files_are_sent_as_they_are():
    found = run("""
      const plain = fetch, sent = [];
      globalThis.fetch = (path, options) => {
        if (options?.method === "POST") sent.push(options.body);
        return plain(path, options);
      };
      const text = "😀".repeat(300);
      for (at("text").value of ["a" + text, "😀".repeat(3)]) await at("compress").onclick();
      at("file").files = [new File([new Uint8Array([37, 80, 68, 70, 255])], "a.pdf")];
      await at("compress").onclick();
      const form = sent.pop(), file = form.get("file");
      const bytes = [...new Uint8Array(await file.arrayBuffer())];
      return [sent.map((body) => JSON.parse(body).name), file.name, bytes, [...form.keys()]];
    """)
    assert found == [["a" + "😀" * 39, "😀" * 3], "a.pdf", [*b"%PDF", 255], ["file", "memory"]]


@needs_node
def test_a_text_that_is_not_on_the_page_is_missed_before_a_question_is_sent():
    found = run("""
      at("contexts").value = "small";
      at("both").checked = true;
      await ask();
      return [log, at("problem").textContent];
    """)
    assert found == [[], "The text of this context is not on this page; compress it here to compare."]

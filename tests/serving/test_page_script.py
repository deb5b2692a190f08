"""The script of the server's page, run by Node.js in a page without a browser."""

import json
import shutil
import subprocess

import pytest

from lkv.serving.routes import page_response

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="there is no Node.js")
# Elements that take everything, and a server: questions about "small" are answered until they are aborted.
PAGE = """
const elements = {}, asked = [];
globalThis.document = { getElementById: (id) => elements[id] ??= {
  value: "", textContent: "", checked: false, files: [], dataset: {}, style: {},
  replaceChildren() {}, add() {}, focus() {},
} };
globalThis.Option = class {};
const context = { id: "small", status: "ready", tokens: 9, bytes: 1, full_bytes: 10, realised_retention: 1 };
const json = (content, status = 200) => new Response(JSON.stringify(content), { status });
globalThis.fetch = async (path, { method, body, signal } = {}) => {
  if (path === "/v1/chat/completions") {
    asked.push(signal);
    return new Response(new ReadableStream({ start(stream) {
      signal.addEventListener("abort", () => stream.error(signal.reason));
    } }));
  }
  if (method !== "POST") return json(path === "/v1/contexts" ? { data: [] } : context);
  return JSON.parse(body).retention === 1 ? json({ error: "Unauthorized" }, 401) : json(context);
};
const at = document.getElementById;
const ask = () => { at("question").value = "Who?"; return at("form").onsubmit({ preventDefault() {} }); };
"""


def run(steps):
    """What `steps` after the page's own script give."""
    script = page_response().body.decode().partition("<script>")[2].partition("</script>")[0]
    code = f"{PAGE}new Function({json.dumps(script)})();\n(async () => {{ {steps} }})().then((found) => " + (
        "{ console.log(JSON.stringify(found)); process.exit(0); });"
    )
    done = subprocess.run([NODE, "-"], input=code, capture_output=True, text=True, timeout=30, check=True)
    return json.loads(done.stdout)


def test_an_error_of_one_answer_ends_the_other_one():
    found = run("""
      at("text").value = "A text.";
      await at("compress").onclick();
      at("both").checked = true;
      await ask();
      return [asked.map((signal) => signal.aborted), at("problem").textContent, at("ask").disabled];
    """)
    assert found == [[True], "Unauthorized", False]


def test_names_are_cut_between_characters():
    found = run("""
      const plain = fetch, names = [];
      globalThis.fetch = (path, options) => {
        if (options?.method === "POST") names.push(JSON.parse(options.body).name);
        return plain(path, options);
      };
      const text = "😀".repeat(300);
      for (at("text").value of ["a" + text, "😀".repeat(3)]) await at("compress").onclick();
      at("file").files = [{ name: "a" + text, arrayBuffer: async () => new TextEncoder().encode("A text.") }];
      await at("compress").onclick();
      return names;
    """)
    assert found == ["a" + "😀" * 39, "😀" * 3, "a" + "😀" * 199]


def test_a_text_that_is_not_on_the_page_is_missed_before_a_question_is_sent():
    found = run("""
      at("contexts").value = "small";
      at("both").checked = true;
      await ask();
      return [asked.length, at("problem").textContent];
    """)
    assert found == [0, "The text of this context is not on this page; compress it here to compare."]

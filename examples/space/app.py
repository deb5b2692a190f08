"""A Gradio app: compress a text with several methods at one memory budget, and compare their answers.

python examples/space/app.py
"""

from functools import cache
from pathlib import Path
from typing import Any

import lkv

TITLE = "# LKV\nPaste a text. Each method reads it once, keeps a share of its KV cache, and then answers your question."
METHODS = {"Full cache": "full", "LKV": "lkv", "SnapKV": "snapkv"}
COLUMNS = ["method", "MB held", "answer"]
QUESTION = "What is the telephone number of the harbour office?"
MAX_CHARACTERS = 20_000  # a text of this length takes a CPU about half a minute
MAX_NEW_TOKENS = 48


@cache
def load() -> tuple[Any, Any]:
    """The demo model and its tokenizer, loaded once."""
    return lkv.load_default()


def compare(text: str, question: str, percent: float) -> list[list[str]]:
    """A row for each method: its name, the MB of its cache, and its answer to `question` at `percent` of the bytes."""
    if (characters := len(text) + len(question)) > MAX_CHARACTERS:
        raise lkv.LkvError(f"Text and question have {characters:,} characters; give at most {MAX_CHARACTERS:,}.")
    text = text.rstrip("\n") + "\n"  # no file's name: lkv.compress refuses those, and visitors need not learn them
    model, tokenizer = load()
    rows = []
    for label, method in METHODS.items():
        memory = None if method == "full" else percent / 100
        context = lkv.compress(model, tokenizer, text, method=method, memory=memory)
        size = f"{context.nbytes() / 1e6:.1f}"
        rows.append([label, size, context.ask(question, max_new_tokens=MAX_NEW_TOKENS)])
    return rows


def example_text() -> str:
    """The log of a lighthouse, beside this file or in the folder above; empty where it is in neither."""
    here = Path(__file__).parent
    files = [folder / "lighthouse.txt" for folder in (here, here.parent) if (folder / "lighthouse.txt").is_file()]
    return files[0].read_text(encoding="utf-8") if files else ""


def build() -> Any:
    """The page."""
    import gradio as gr

    def answer(text: str, question: str, percent: float) -> list[list[str]]:
        try:
            return compare(text, question, percent)
        except lkv.LkvError as error:
            raise gr.Error(str(error)) from error

    with gr.Blocks(title="LKV") as page:
        gr.Markdown(TITLE)
        text = gr.Textbox(example_text(), label="Text", lines=12, max_lines=12)
        question = gr.Textbox(QUESTION, label="Question")
        percent = gr.Slider(3, 50, 10, step=1, label="Memory, % of the full cache's bytes")
        button = gr.Button("Compress and ask", variant="primary")
        table = gr.Dataframe(headers=COLUMNS, wrap=True, interactive=False, label="Answers")
        button.click(answer, [text, question, percent], table, concurrency_limit=1)
    return page


if __name__ == "__main__":
    build().launch()

"""Parts of `make soak` that draw from the documents, GGUF files, requests and options of generation of the tests.

Each draws at random and compares with an oracle: the text that a browser or reader shows, a forward pass over the file
by gguf's own reader, `Context.ask`, and the stock model.
"""

import codecs
import contextlib
import io
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from lkv.context.compression import compress
from lkv.context.document_reader import Document, parse_document
from lkv.errors import LkvError
from tests.conftest import tiny_llama
from tests.context.pdf_documents import PDFS
from tests.context.pdf_texts import PDF_TEXTS
from tests.context.test_compression import TEXT as WORDS
from tests.context.test_compression import Words
from tests.context.test_documents import PAGES, TEXTS
from tests.hf.gguf_files import DIM, EPSILON, largest_difference, write_gguf
from tests.hf.test_gguf_settings import FILES, LINEAR, YARN
from tests.serving.server import KNORM, TEXT, serving, tiny

Counts = dict[str, int]
_BLANK = ("\n", " ", "\t\n", "<!-- a comment -->\n")


def documents(seconds: float, start: int) -> tuple[Counts, int]:
    """Documents of the corpus, in other encodings, with comments before them, and damaged."""
    chance, counts = random.Random(start), {"documents": 0, "damaged": 0, "refused": 0}
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        _read_page(chance)
        data, name = _draw_document(chance)
        for _ in range(5):
            place, size = chance.randrange(len(data) + 1), chance.randrange(1, 40)
            changed = data[:place] + chance.choice([b"", chance.randbytes(size), b"\0"]) + data[place + size :]
            counts["damaged"] += 1
            try:
                document = parse_document(changed, name)
            except LkvError:
                counts["refused"] += 1
            else:
                assert document.text.strip() and "\0" not in document.text, (start, changed)
        counts["documents"] += 1
    return counts, start + 1


def _read_page(chance: random.Random) -> None:
    """Compare a page of the corpus in another encoding with its text."""
    source, text, skipped = PAGES[chance.choice([name for name in PAGES if PAGES[name][1]])]
    if "charset" in source.lower() or "encoding" in source.lower():
        return
    before = "".join(chance.choices(_BLANK, k=chance.randrange(3)))
    mark, encoding = chance.choice(
        [(codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be")]
    )
    data = mark + (before + source).encode(encoding)
    assert parse_document(data, "page.html") == Document(text, skipped), (encoding, before, source)


def _draw_document(chance: random.Random) -> tuple[bytes, str]:
    kind = chance.randrange(3)
    if kind == 0:
        return PAGES[chance.choice([*PAGES])][0].encode(), "page.html"
    if kind == 1:
        return chance.choice([*PDFS.values(), *PDF_TEXTS.values()]).data, "file.pdf"
    case = chance.choice(TEXTS)
    is_hex = case["encoding"] == "hex"
    return bytes.fromhex(case["text"]) if is_hex else case["text"].encode(case["encoding"]), case["file"]


def models(seconds: float, start: int) -> tuple[Counts, int]:
    """GGUF files of random architecture, scaling and factors, against a forward pass over gguf's own reader."""
    chance, counts = random.Random(start), {"GGUF files": 0, "refused files": 0}
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        architecture, settings, tensors, more = FILES[chance.choice([*FILES])]
        settings = EPSILON | {"rope.freq_base": chance.choice([500.0, 1e4, 5e5])} | settings
        if not more and "rope.scaling.type" not in settings and architecture in ("llama", "qwen2", "qwen3", "qwen3moe"):
            settings |= chance.choice([{}, LINEAR, YARN, {"rope.scaling.factor": 2.0, "rope.scaling.type": "linear"}])
        if architecture == "llama" and not more and chance.random() < 0.3:
            more = {"rope_freqs__weight": np.array([chance.uniform(1, 9) for _ in range(DIM // 2)])}
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict("os.environ", {"LKV_CACHE": f"{folder}/cache"}):
            path = write_gguf(Path(folder) / "tiny.gguf", architecture, settings, tensors, **more)
            try:
                with contextlib.redirect_stderr(io.StringIO()):
                    difference = largest_difference(path, chance.randrange(2, 80))
            except LkvError as error:  # of settings that do not go together, by name
                if "rope" not in str(error):
                    raise
                counts["refused files"] += 1
                continue
            assert difference < 1e-4, (architecture, settings, more, difference)
        counts["GGUF files"] += 1
    return counts, start + 1


def requests(seconds: float, start: int) -> tuple[Counts, int]:
    """Requests as clients send them, with random fields: the answers of `Context.ask`, or errors in OpenAI's form."""
    chance, counts = random.Random(start), {"requests": 0, "refused requests": 0}
    with tempfile.TemporaryDirectory() as folder:
        parts = tiny(Path(folder) / "model")
        own = compress(*parts, TEXT, **KNORM)
        with serving(*parts, Path(folder) / "store") as server:
            name = server.compressed(TEXT)
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                question, tokens = chance.choice(["Who?", "Wo liegt es?", "41?", "é 🙂"]), chance.randrange(1, 20)
                body: dict[str, Any] = {"messages": [{"role": "user", "content": question}]}
                body |= chance.choice([{"model": "tiny", "context": name}, {"model": f"tiny:{name}"}])
                body |= chance.choice([{"max_tokens": tokens}, {"max_completion_tokens": tokens}])
                stream = body["stream"] = chance.random() < 0.5
                for more in (
                    {"temperature": 0}, {"top_p": 1}, {"n": 1}, {"user": "me"}, {"tools": None}, {"stop": None},
                    {"presence_penalty": 0}, {"response_format": {"type": "text"}}, {"seed": 1}, {"logprobs": False},
                ):  # fmt: skip
                    body |= more if chance.random() < 0.3 else {}
                wrong = chance.random() < 0.2
                if wrong:
                    body |= chance.choice(
                        [{"n": 2}, {"tools": [1]}, {"temperature": 3}, {"max_tokens": 0}, {"messages": []},
                         {"stop": [""]}, {"context": "none"}, {"contxt": 1}, {"stream": "yes"}]
                    )  # fmt: skip
                status, content = server.ask("/v1/chat/completions", body)
                counts["requests"] += 1
                if wrong:
                    assert status in (400, 404) and set(content["error"]) == {"message", "type", "param", "code"}, body
                    counts["refused requests"] += 1
                    continue
                assert status == 200, (body, content)
                text = _streamed(content) if stream else content["choices"][0]["message"]["content"]
                assert text == own.ask(question, tokens), body
    return counts, start + 1


def _streamed(content: str) -> str:
    """The text of an answer in server-sent events."""
    events = [event.removeprefix("data: ") for event in content.split("\n\n") if event]
    assert events.pop() == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["delta"].get("content", "") for event in events)


def options(seconds: float, start: int) -> tuple[Counts, int]:
    """Random options of generation over a whole text: the ids of the stock model's `generate`, sampled ones too."""
    chance, counts = random.Random(start), {"generations": 0, "refused options": 0}
    model = tiny_llama(seed=start, dtype=torch.float64)
    context = compress(model, Words(), WORDS, method="knorm", retention=1.0)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        flags: dict[str, Any] = {}
        for more in (
            {"repetition_penalty": chance.uniform(0.8, 1.5)}, {"no_repeat_ngram_size": 2}, {"num_beams": 2},
            {"min_new_tokens": 3}, {"bad_words_ids": [[chance.randrange(3, 20)]]}, {"suppress_tokens": [5, 6]},
            {"do_sample": True, "temperature": chance.uniform(0.2, 2)}, {"top_k": 5}, {"top_p": 0.7},
            {"renormalize_logits": True}, {"exponential_decay_length_penalty": (2, 1.2)}, {"min_p": 0.1},
            {"encoder_repetition_penalty": 1.2}, {"eos_token_id": [2, 9]}, {"forced_eos_token_id": 2},
            {"prompt_lookup_num_tokens": 2}, {"num_return_sequences": 2}, {"max_time": 60.0},
        ):  # fmt: skip
            flags |= more if chance.random() < 0.15 else {}
        question = [chance.randrange(3, 20) for _ in range(chance.randrange(1, 6))]
        length = chance.randrange(1, 12)
        torch.manual_seed(start)
        try:
            answer = context.complete(question, length, **flags)
        except LkvError:
            counts["refused options"] += 1
            continue
        row = torch.tensor([context.ids + question])
        torch.manual_seed(start)
        settings = {"do_sample": False, "num_beams": 1, "pad_token_id": Words().pad_token_id} | flags
        mask = torch.ones_like(row)
        expected = model.generate(row, attention_mask=mask, max_new_tokens=length, **settings)
        assert answer == expected[0, row.shape[1] :].tolist(), (start, question, length, flags)
        counts["generations"] += 1
    return counts, start + 1

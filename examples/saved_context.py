"""Compress a text, save it, load it and ask questions: the file holds the kept 15% of the KV cache and nothing else.

python -m examples.saved_context
"""

import tempfile
from pathlib import Path

import torch

from examples.document import NOTES, document
from lkv import Context, compress, load_default


def main() -> None:
    model, tokenizer = load_default(torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "licence.kv"
        compress(model, tokenizer, document(tokenizer, 1000), retention=0.15).save(path)
        print(f"saved in {path.stat().st_size:,} bytes")
        context = Context.load(path, model, tokenizer)
    for _, _, question, _ in NOTES:
        print(f"{question} {context.ask(question, max_new_tokens=14)}")
    other = context.fork()  # a second conversation over the same compressed text
    print(other.ask("Who wrote this licence?", max_new_tokens=14, do_sample=True))


if __name__ == "__main__":
    main()

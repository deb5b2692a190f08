"""Compress a text today, ask it tomorrow: the file holds 15% of the cache and nothing of what was evicted.

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
    # Two ways on from one compressed text, neither seeing the other.
    other = context.fork()
    print(other.ask("Who wrote this licence?", max_new_tokens=14, do_sample=True))


if __name__ == "__main__":
    main()

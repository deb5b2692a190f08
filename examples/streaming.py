"""Read a long text in chunks: the cache never holds more than 15% of the tokens so far and one chunk of one layer.

python -m examples.streaming
"""

import torch

from examples.document import NOTES, document
from lkv import compress, load_default


def main() -> None:
    model, tokenizer = load_default(torch.bfloat16)
    context = compress(model, tokenizer, document(tokenizer), retention=0.15, chunk=512, streaming=True)
    print(f"{context.tokens} tokens in parts of 512, {context.nbytes():,} bytes held")
    for _, _, question, _ in NOTES:
        print(f"{question} {context.ask(question, max_new_tokens=14)}")


if __name__ == "__main__":
    main()

"""Combine eviction with quantisation: 15% of the KV entries, in 8 or 4 bits a value.

python -m examples.quantised
"""

import torch

from examples.document import NOTES, document
from lkv import compress, load_default


def main() -> None:
    model, tokenizer = load_default(torch.bfloat16)
    text = document(tokenizer, 1000)
    for bits in (None, 8, 4):
        context = compress(model, tokenizer, text, retention=0.15, bits=bits)
        share = context.nbytes() / context.full_nbytes()
        print(f"{bits or 16} bits: {context.nbytes():,} bytes, {share:.3f} of the full cache")
        for _, _, question, _ in NOTES:
            print(f"  {question} {context.ask(question, max_new_tokens=14)}")


if __name__ == "__main__":
    main()

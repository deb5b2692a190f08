"""Generate for prompts of unequal length in one batch: each row keeps 15% of its own tokens, padding is never stored.

python -m examples.batch
"""

import torch

from examples.document import NOTES, document
from lkv import RaggedCache, load_default


def main() -> None:
    model, tokenizer = load_default(torch.bfloat16)
    tokenizer.padding_side = "left"
    prompts = []
    for (_, _, question, _), tokens in zip(NOTES, (900, 600, 700), strict=True):
        turn = [{"role": "user", "content": f"{document(tokenizer, tokens)}\n\n{question}"}]
        prompts.append(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    cache = RaggedCache(model, retention=0.15)
    out = model.generate(**inputs, past_key_values=cache, max_new_tokens=14, do_sample=False)  # type: ignore[operator]
    for (_, _, question, _), row in zip(NOTES, out[:, inputs["input_ids"].shape[1] :], strict=True):
        print(f"{question} {str(tokenizer.decode(row, skip_special_tokens=True)).strip()}")
    print(f"{cache.nbytes():,} bytes held; a full cache of this batch holds {cache.full_nbytes():,}")


if __name__ == "__main__":
    main()

"""KVzip for one prompt, in one call."""

from lkv.methods.build import make_method


def kvzip(model, tokenizer, ids, prompt, amount, name="kvzip", policy=None, pattern=None):
    method = make_method(name, amount, policy, model=model, layers=len(prompt), pattern=pattern, tokenizer=tokenizer)
    return method.for_prompt(ids, prompt)

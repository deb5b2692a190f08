"""KVzip for one prompt, in one call."""

from lkv.methods.method import resolve_method


def kvzip(model, tokenizer, ids, prompt, retention, name="kvzip", policy=None, pattern=None):
    options = {"retention": retention, "policy": policy, "pattern": pattern, "tokenizer": tokenizer}
    return resolve_method(name, model, **options).for_prompt(ids, prompt)

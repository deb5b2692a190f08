"""Text that grows with the tokens of an answer: what was sent stays."""

import pytest

from lkv.serving.answers import IncrementalDetokenizer


class Bytes:
    """A tokenizer whose tokens are bytes: characters come in parts."""

    def __call__(self, text, **_):
        return {"input_ids": list(text.encode())}

    def decode(self, ids, **_):
        return bytes(ids).decode(errors="replace")


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("backend", [False, True])
@pytest.mark.parametrize(
    ("text", "stops", "right"),
    [
        ("  Grüße, Łódź! 😀 👩‍👩‍👧 \n", [], "Grüße, Łódź! 😀 👩‍👩‍👧"), ("one stop two", ["stop"], "one"),
        ("a sto stop b", ["stop"], "a sto"), ("never ends st", ["stop"], "never ends st"),
        ("x\n\ny", ["\n\n", "y"], "x"), ("stop", ["stop"], ""), ("tab\tand  two  spaces", [], "tab\tand  two  spaces"),
        ("日本語のテキスト", [], "日本語のテキスト"), ("👍🏽", [], "👍🏽"),
    ],
)  # fmt: skip
def test_text_grows_as_it_will_stay(parts, text, stops, right, step, backend):
    tokenizer = parts[1] if backend else Bytes()
    detokenizer, sent = IncrementalDetokenizer(tokenizer, stops), ""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if backend:  # without a decoder, it shows spaces as other characters
        whole = tokenizer.decode(ids, skip_special_tokens=True).strip()
        right = whole[: min([len(whole), *(whole.index(stop) for stop in stops if stop in whole)])].rstrip()
    assert (detokenizer._backend is not None) == backend
    for end in range(step, len(ids) + step, step):
        sent += detokenizer.push(ids[:end], end >= len(ids))
        assert right.startswith(sent)
        if detokenizer.is_stopped:
            break
    assert sent == right

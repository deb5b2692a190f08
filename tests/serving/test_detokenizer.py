"""Text that grows with the tokens of an answer: what was sent stays."""

import pytest
from tokenizers import Tokenizer, decoders, models
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast

from lkv.serving.answer import IncrementalDetokenizer


def test_bytes_that_were_a_character_and_are_none_do_not_end_an_answer():
    """As a tokenizer with byte fallback decodes them: the stream refuses what its prefix has become."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "a"]
    backend = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)
    ids = [1 + 0xC3, 1 + 0xA9, 1 + 0xFF, 257, 257]
    stream, refused = DecodeStream(skip_special_tokens=True), False
    for token in ids:
        try:
            stream.step(backend, token)
        except Exception:
            refused = True
    assert refused
    detokenizer = IncrementalDetokenizer(tokenizer, [])
    sent = "".join(detokenizer.push(ids[:end], end == len(ids)) for end in range(1, len(ids) + 1))
    assert sent.endswith("aa")


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

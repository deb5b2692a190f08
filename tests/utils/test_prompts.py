"""Texts and what follows them: their ids are those of the whole, for every kind of tokenizer."""

import logging
import random

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lkv.hf.loading import load_default
from lkv.utils import prompts
from lkv.utils.prompts import decode_tail, encode, encode_context, encode_continuation, encode_question, strip_end

SCRIPTS = [
    "The lamp of the lighthouse is lit at dusk. 42 ships passed.\n\nQuestion: who? Answer:", "Маяк горит ночью.",
    "灯台守の日記です。東京", "שלום עולם", "مرحبا بالعالم", "naïve café déjà", "  def f(x):\n\treturn x**2  # ok",
]  # fmt: skip
WORDS = [*" ".join(SCRIPTS).split(), "\n", "\n\n", "</s>", "  ", ".", "42", "👩\u200d👧", "é", "zz", "'s", "e\u0301"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
AFTER_SPACE = [
    decoders.Replace("▁", " "),
    decoders.ByteFallback(),
    decoders.Fuse(),
    decoders.Strip(content=" ", left=1),
]


def train(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer of `kind`, trained on a few words of each script."""
    unknown, alphabet, special = "<unk>", [], ["<s>", "</s>"]
    if kind.startswith("byte-level"):
        unknown, alphabet = None, pre_tokenizers.ByteLevel.alphabet()
        tokenizer, trainer = Tokenizer(models.BPE()), trainers.BpeTrainer
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind == "byte-level with a space")
        tokenizer.decoder = decoders.ByteLevel()
    elif kind == "WordPiece":
        tokenizer, trainer = Tokenizer(models.WordPiece(unk_token="<unk>")), trainers.WordPieceTrainer
        tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
    elif kind == "Unigram":
        tokenizer, trainer = Tokenizer(models.Unigram()), trainers.UnigramTrainer
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    else:
        tokenizer, trainer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True)), trainers.BpeTrainer
        special, tokenizer.decoder = [*special, *BYTES], decoders.Sequence(AFTER_SPACE)
        if kind == "SentencePiece of Llama 2":
            tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        else:
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind.removeprefix("Metaspace "))
    settings = {"unk_token": unknown} if kind == "Unigram" else {"initial_alphabet": alphabet}
    special = [*special, unknown] if unknown else special
    tokenizer.train_from_iterator(SCRIPTS * 5, trainer(vocab_size=700, special_tokens=special, **settings))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token=unknown)


KINDS = [
    "byte-level", "byte-level with a space", "Metaspace first", "Metaspace always", "Metaspace never",
    "SentencePiece of Llama 2", "Unigram", "WordPiece",
]  # fmt: skip


def random_texts(draw: random.Random) -> tuple[str, str]:
    def text(words: int) -> str:
        return draw.choice(["", " "]).join(draw.choice(WORDS) for _ in range(draw.randint(1, words)))

    return text(9) * draw.choice([1, 1, 1, 40]), draw.choice(["", " ", "\n"]) + text(6)


@pytest.fixture(scope="module", params=[*KINDS, "SmolLM2"])
def tokenizer(request):
    return load_default()[1] if request.param == "SmolLM2" else train(request.param)


def test_ids_of_a_text_and_what_follows_are_those_of_the_whole(tokenizer):
    draw, equal = random.Random(0), 0
    for before, text in (random_texts(draw) for _ in range(300)):
        context, whole = encode(tokenizer, before), encode(tokenizer, before + text)
        if context and whole[: len(context)] == context:
            equal += 1
            assert context + encode_continuation(tokenizer, text, before) == whole, (before[-40:], text)
    assert equal > 200


def test_a_boundary_that_would_differ_is_logged_once(tokenizer, caplog):
    prompts._log_joined_boundary.cache_clear()
    draw = random.Random(0)
    with caplog.at_level(logging.INFO, prompts.__name__):
        for before, text in [("lamp", "lamp"), ("light", "house"), *(random_texts(draw) for _ in range(300))]:
            encode_continuation(tokenizer, text, before)
    assert [record.getMessage().split(" would join")[1][:12] for record in caplog.records] in ([" the end of "], [])


@pytest.mark.parametrize("kind", ["Metaspace first", "Metaspace always", "SentencePiece of Llama 2"])
def test_questions_begin_without_the_space_that_begins_texts(kind):
    tokenizer = train(kind)
    context = encode(tokenizer, "灯台守")
    for before in ("", decode_tail(tokenizer, context)):
        ids = encode_question(tokenizer, "who?", before)
        assert context + ids == encode(tokenizer, "灯台守\n\nQuestion: who?\nAnswer:")
        assert tokenizer.convert_ids_to_tokens(ids)[0] != "▁"


@pytest.mark.parametrize("end", ["", "\n", " \r\n", "\n\n\n", "   "])
def test_white_space_at_the_end_of_a_text_does_not_merge_with_what_follows(end):
    tokenizer = load_default()[1]
    text = "The harbour is kept by Ingrid."
    kept = strip_end(tokenizer, text + end)
    assert kept == (text + end if end in ("", "   ") else text)
    turn = {"role": "user", "content": f"{kept}\n\nWhat?"}
    whole = tokenizer.apply_chat_template([turn], tokenize=False, add_generation_prompt=True)
    ids = encode_context(tokenizer, kept) + encode_question(tokenizer, "What?")
    assert ids == encode(tokenizer, whole)

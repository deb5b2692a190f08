"""Parity with kvpress: its pipeline cuts and tokenises a prompt as the protocol of its name does."""

import warnings
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

with warnings.catch_warnings():
    # A package that kvpress imports uses a module of the standard library that goes away.
    warnings.filterwarnings("ignore", "'pipes' is deprecated", DeprecationWarning)
    kvpress = pytest.importorskip("kvpress")

from lkv.evaluation.example import make_prompt
from tests.evaluation.test_example import CHAT, byte_tokenizer, example

BASE = byte_tokenizer(None, bos=True)
# kvpress finds the place of the context by a run of this character.
words = st.text(st.characters(exclude_characters="#", exclude_categories=["Cs"]), min_size=1, max_size=30)


@given(words, words, words, st.booleans())
def test_the_ids_are_those_of_kvpress(context, question, prefix, chat):
    tokenizer = CHAT if chat else BASE
    preprocess = kvpress.KVPressTextGenerationPipeline.preprocess
    theirs = preprocess(SimpleNamespace(tokenizer=tokenizer), context, [question], prefix, 10**9)
    ours = make_prompt(example(context, question=question, answer_prefix=prefix), tokenizer, "kvpress", 10**6)
    assert ours.context == theirs["context_ids"][0].tolist()
    assert ours.question == theirs["questions_ids"][0][0].tolist()

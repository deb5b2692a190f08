"""Contexts with images: asked, saved and loaded; what is protected, and what is refused."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import DynamicCache

from lkv.context.chat import Chat
from lkv.context.compression import compress
from lkv.context.context import Context
from lkv.errors import CacheError, ContextFileError, LkvError, PromptError
from lkv.hf.attention import patch_attention
from lkv.hf.prompt_kv import read_prompt
from lkv.methods.selectors.kvzip import ReplayLayer, replay
from lkv.utils.prompts import decode_tail, encode_continuation, encode_question
from tests.conftest import present, tiny_llama
from tests.hf.test_vision_models import assert_close, masked, method_of
from tests.vision import CONTEXT_PARAMS, TOKENS, VISION, VisionFamily, exact_states, picture, tokenizer

TEXT = "Two pictures, then a text that says what they show to those who look at them for long."
QUESTIONS = ["What is there?", "And who?"]
OPTIONS = {"max_new_tokens": 6, "eos_token_id": None}


@pytest.fixture(params=CONTEXT_PARAMS)
def family(request) -> VisionFamily:
    return present(request.param)


@pytest.fixture
def model(family: VisionFamily) -> Any:
    with exact_states(family):
        yield family.build()


@pytest.fixture
def qwen() -> tuple[Any, Any]:
    present(VISION[0])
    return VISION[0].build(), VISION[0].processor()


def pictures() -> list[Image.Image]:
    return [picture(), picture(1, 16, 48)]


@pytest.mark.slow
def test_contexts_with_images_equal_the_masked_model(family, model, monkeypatch, tmp_path):
    """Prompt, question and answer are those of the processor's chat template, in one text."""
    method, processor = method_of(model), family.processor()
    context = compress(model, processor, TEXT, images=pictures(), method=method)
    other = compress(model, processor, "Another text with another picture.", images=[picture(3, 64)], method=method)
    inputs = family.encode(f"{TEXT}\n\n{QUESTIONS[0]}", pictures())
    logits, target = context.predict(QUESTIONS[0], "It is a picture.")
    prompt, more = len(context.ids), inputs["input_ids"][:, len(context.ids) :]
    turn = processor.tokenizer("<s>assistant\n", add_special_tokens=False, return_tensors="pt")["input_ids"]
    more = torch.cat([more, turn, target[None, :-1]], 1)
    assert inputs["input_ids"][0, :prompt].tolist() == context.ids
    short = family.encode(TEXT, pictures())
    text = {name: x[:, :prompt] if x.shape[:2] == short["input_ids"].shape else x for name, x in short.items()}
    expected = masked(model, method, text, more, monkeypatch)[0, -len(target) :]
    assert_close(logits, expected)
    answers = [context.ask(question, **OPTIONS) for question in QUESTIONS]
    others = [other.ask(question, **OPTIONS) for question in QUESTIONS]
    assert [context.fork().ask(question, **OPTIONS) for question in QUESTIONS] == answers
    assert context.batch_ask(QUESTIONS, **OPTIONS) == answers
    assert other.batch_ask(QUESTIONS, **OPTIONS) == others != answers
    assert "".join(context.stream(QUESTIONS[0], **OPTIONS)).strip() == answers[0]
    context.save(tmp_path / "text.kv")
    loaded = Context.load(tmp_path / "text.kv", model, processor)
    assert loaded.batch_ask(QUESTIONS, **OPTIONS) == [loaded.ask(question, **OPTIONS) for question in QUESTIONS]
    assert [loaded.ask(question, **OPTIONS) for question in QUESTIONS] == answers
    assert_close(loaded.predict(QUESTIONS[0], "It is a picture.")[0], expected)
    if context.cache.is_shareable:
        chat = Chat(loaded)
        assert chat.ask(QUESTIONS[0], **OPTIONS) == answers[0]
        chat.ask(QUESTIONS[1], **OPTIONS)
        chat.undo()
        assert chat.ask(QUESTIONS[1], **OPTIONS) == chat.turns[-1].answer


@torch.no_grad()
def test_a_full_context_equals_the_stock_model(family, model):
    processor = family.processor()
    full = compress(model, processor, TEXT, images=pictures(), method="full")
    model.generate(**family.encode("Another.", [picture(3, 64)]), max_new_tokens=2, pad_token_id=0)
    logits, target = full.predict(QUESTIONS[0], "It is.")
    inputs = family.encode(f"{TEXT}\n\n{QUESTIONS[0]}", pictures())
    turn = processor.tokenizer("<s>assistant\n", add_special_tokens=False, return_tensors="pt")["input_ids"]
    new = torch.cat([turn, target[None, :-1]], 1)
    text = {
        name: torch.cat([x, torch.zeros_like(new) + (name == "attention_mask")], 1).to(x.dtype)
        if x.shape[:2] == inputs["input_ids"].shape
        else x
        for name, x in inputs.items()
    } | {"input_ids": torch.cat([inputs["input_ids"], new], 1)}
    stock = model(**text, past_key_values=DynamicCache(config=model.config), use_cache=True).logits[0, -len(target) :]
    assert_close(logits, stock)
    everything = compress(model, processor, TEXT, images=pictures(), method="knorm", retention=1.0)
    assert_close(everything.predict(QUESTIONS[0], "It is.")[0], stock)
    answers = [context.ask(QUESTIONS[0], **OPTIONS) for context in (everything, full)]
    assert answers[0] == answers[1]
    # The model read a batch of other texts last.
    others = [("One.", [picture(3, 64)]), ("Two.", [picture(4)]), ("Three.", [picture(5, 16, 48)])]
    model.generate(**family.encode_batch(others), max_new_tokens=2, pad_token_id=0)
    assert [context.ask(QUESTIONS[0], **OPTIONS) for context in (everything, full)] == answers
    assert everything.batch_ask(QUESTIONS, **OPTIONS)[0] == answers[0]


@pytest.mark.parametrize("method", ["snapkv", "keydiff", "expected", "kvzip"])
def test_methods_without_a_policy_work(family, model, method, tmp_path):
    context = compress(model, family.processor(), TEXT, images=pictures(), method=method, retention=0.5)
    assert 0.4 < context.realised_retention() <= 0.51
    context.save(tmp_path / "text.kv")
    loaded = Context.load(tmp_path / "text.kv", model, family.processor())
    assert loaded.ask(QUESTIONS[0], **OPTIONS) == context.ask(QUESTIONS[0], **OPTIONS)


class NoRecord(ReplayLayer):
    """A layer of a second pass that records nothing."""

    def record(self, *_: Any) -> None:
        pass


@torch.no_grad()
@pytest.mark.parametrize("family", [VISION[0], VISION[3]], ids=lambda family: family.label)
def test_kvzip_repeats_the_images_themselves(family):
    """The second pass equals the stock model on the prompt, a request and the same prompt with the same images."""
    present(family)
    model, inputs = family.build(), family.encode(TEXT, pictures())
    text = inputs["input_ids"]
    images = {name: x for name, x in inputs.items() if name not in ("input_ids", "attention_mask")}
    prompt = read_prompt(model, text, images=images)
    request = [20, 21, 22]
    layers = [NoRecord(layer) for layer in prompt]
    repeated = slice(0, text.shape[1])
    found = replay(model, prompt, layers, request + text[0].tolist(), repeated=repeated).last_hidden_state
    both = torch.cat([text, torch.tensor([request]), text], 1)
    # Without a mask older versions of transformers take positions that repeat for those of packed texts.
    mask = torch.ones_like(both)
    if prompt.positions is None:
        twice = {name: torch.cat([x, x], 1) for name, x in images.items()}
    else:  # the second pass counts on from the prompt's positions
        twice = {name: torch.cat([x, x]) for name, x in images.items() if name != "mm_token_type_ids"}
        more = prompt.positions.max() + 1 + torch.arange(both.shape[1] - text.shape[1])
        twice["position_ids"] = torch.cat([prompt.positions, more.expand(3, 1, -1)], 2)
    assert_close(
        found,
        model.model(input_ids=both, attention_mask=mask, **twice, use_cache=False).last_hidden_state[
            :, text.shape[1] :
        ],
    )


def test_tiers_keep_the_memory_budget_with_images(family, model, tmp_path):
    model = family.build(torch.float32)
    context = compress(model, family.processor(), TEXT, images=pictures(), method="knorm", memory=0.4)
    assert context.cache.realised_retention() > 0.4
    answers = context.batch_ask(QUESTIONS, **OPTIONS)
    context.save(tmp_path / "text.kv")
    assert Context.load(tmp_path / "text.kv", model, family.processor()).batch_ask(QUESTIONS, **OPTIONS) == answers


def kept_positions(model: Any, processor: Any, **options: Any) -> tuple[list[int], set[int]]:
    """The ids of a context, and the places whose keys every head keeps in the first layer."""
    full = compress(model, processor, TEXT, method="full", **{k: v for k, v in options.items() if k != "protect"})
    context = compress(model, processor, TEXT, method="knorm", retention=0.5, **options)
    return context.ids, kept_in_all_heads(context, full)


def kept_in_all_heads(context: Any, full: Any) -> set[int]:
    """The places whose keys every head of the first layer keeps."""
    keys, store = full.cache.layers[0].keys[0], context.cache.ragged_layers[0].store
    kept = []
    for head, (start, count) in enumerate(zip(store.starts[0].tolist(), store.counts[0].tolist(), strict=True)):
        distance = torch.cdist(store.k[start : start + count], keys[head])
        kept.append({int(place) for place in distance.argmin(1)})
    return set.intersection(*kept)


def test_images_and_words_are_protected(qwen):
    model, processor = qwen
    image = TOKENS["<image>"]
    ids, kept = kept_positions(model, processor, images=pictures(), protect="images")
    places = {place for place, token in enumerate(ids) if token == image}
    assert len(places) == 8 + 12 and places <= kept
    ids, kept = kept_positions(
        model, processor, images=pictures(), protect=[np.int64(1), "text that", (0, 3)], system="Be kind."
    )
    second = [place for place, token in enumerate(ids) if token == image][8:]
    text = processor.tokenizer.decode(ids[second[-1] + 2 :])
    start = second[-1] + 2 + text.index("text that")
    assert {*second, *range(start, start + 9), *range(second[-1] + 2, second[-1] + 5)} <= kept
    ids, kept = kept_positions(model, processor, images=pictures(), protect=["kind"], system="Be kind.")
    start = processor.tokenizer.decode(ids).index("kind") - len("<s>") + 1
    assert {*range(start, start + 4)} <= kept


def test_images_stand_where_the_text_has_their_tokens(qwen):
    model, processor = qwen
    text = "First <vs><image><ve> then <vs><image><ve> and that is all."
    context = compress(model, processor, text, images=pictures(), method="knorm", retention=0.5)
    shown = processor.tokenizer.decode(context.ids)
    assert shown == f"<s>user\nFirst <vs>{'<image>' * 8}<ve> then <vs>{'<image>' * 12}<ve> and that is all."
    with pytest.raises(PromptError, match=r"protect names words between images \('then <vs>"):
        compress(model, processor, text, images=pictures(), method="knorm", retention=0.5, protect=["then"])
    with pytest.raises(PromptError, match=r"2 places for images \(<image>\), but there are 1 images"):
        compress(model, processor, text, images=[picture()], method="knorm")


def conversation(question: str = "", is_answered: bool = False) -> list[dict[str, Any]]:
    """A conversation with two pictures, whose last message the question continues or follows."""
    parts: list[dict[str, Any]] = [
        {"type": "image", "image": picture()},
        {"type": "text", "text": "The first shows the pier, and the second the lamp:"},
        {"type": "image", "image": picture(1, 16, 48)},
        {"type": "text", "text": TEXT + (f"\n\n{question}" if question and not is_answered else "")},
    ]
    turns = [{"role": "system", "content": [{"type": "text", "text": "Be kind."}]}, {"role": "user", "content": parts}]
    if is_answered:
        turns.append({"role": "assistant", "content": [{"type": "text", "text": "A lamp."}]})
    if is_answered and question:
        turns.append({"role": "user", "content": [{"type": "text", "text": question}]})
    return turns


@torch.no_grad()
@pytest.mark.parametrize("is_answered", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["open", "answered"])
def test_images_in_messages_are_those_of_the_processor_s_template(family, model, is_answered, monkeypatch):
    """Context and question are what `processor.apply_chat_template` returns for both."""
    method, processor, question = method_of(model), family.processor(), QUESTIONS[0]
    context = compress(model, processor, conversation(is_answered=is_answered), method=method)
    inputs = processor.apply_chat_template(
        conversation(question, is_answered),
        add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt",
    )  # fmt: skip
    inputs = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    whole, tokens = inputs["input_ids"], context.tokens
    before = decode_tail(context.tokenizer, context.ids)
    assert [*context.ids, *encode_question(context.tokenizer, question, before, context.kind)] == whole[0].tolist()
    logits, target = context.predict(question, "It is a picture.")
    text = {name: x[:, :tokens] if x.shape[:2] == whole.shape else x for name, x in inputs.items()}
    more = torch.cat([whole[:, tokens:], target[None, :-1]], 1)
    assert_close(logits, masked(model, method, text, more, monkeypatch)[0, -len(target) :])
    full = compress(model, processor, conversation(is_answered=is_answered), method="full")
    answer = model.generate(**inputs, **OPTIONS, do_sample=False, pad_token_id=0)[0, whole.shape[1] :]
    assert full.ask(question, **OPTIONS) == processor.tokenizer.decode(answer, skip_special_tokens=True).strip()
    if context.cache.is_shareable:
        assert context.batch_ask(QUESTIONS, **OPTIONS) == [context.ask(each, **OPTIONS) for each in QUESTIONS]
        chat = Chat(context)
        assert chat.ask(question, **OPTIONS) == context.ask(question, **OPTIONS)


def test_images_roles_and_words_of_messages_are_protected(qwen):
    model, processor = qwen
    protect = [1, {"role": "system"}, "those who look"]
    context = compress(model, processor, conversation(), method="knorm", retention=0.5, protect=protect)
    full = compress(model, processor, conversation(), method="full")
    shown = processor.tokenizer.decode(context.ids)
    images = [place for place, token in enumerate(context.ids) if token == TOKENS["<image>"]]
    places = {*images[8:]}
    # One token a letter, but for the special ones.
    for words in ("Be kind.", "those who look"):
        tokens = processor.tokenizer(words)["input_ids"]
        start = next(at for at in range(context.tokens) if context.ids[at : at + len(tokens)] == tokens)
        places |= {*range(start, start + len(tokens))}
    assert "those who look" in shown and len(places) == 12 + 8 + 14 and places <= kept_in_all_heads(context, full)
    with pytest.raises(PromptError, match="protect names words between images"):
        compress(model, processor, conversation(), method="knorm", protect=[{"role": "user"}])


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "video", "video": "a.mp4"}, "a part of type 'video' that is not read; give .* a video as some of"),
        ({"type": "audio", "audio": "a.wav"}, "a part of type 'audio' that is not read"),
        ({"type": "image"}, "a part of type 'image' that is not read; give"),
        ({"type": "text"}, "a part of type 'text' that is not read"),
        ("a text", "a part of type None that is not read"),
        ({"type": "text", "text": "\0"}, "a message holds NUL characters"),
        ({"type": "text", "text": "<image>"}, r"the text has 2 places for images \(<image>\), but there are 1 images"),
        ({"type": "image", "image": "no picture"}, "the processor refuses the images"),
    ],
)
def test_parts_that_are_not_read_are_named(qwen, part, message):
    model, processor = qwen
    parts = [{"type": "image", "image": picture()}, part, {"type": "text", "text": TEXT}]
    refused(message, model, processor, text=[{"role": "user", "content": parts}])


def test_image_tokens_of_the_text_are_counted_as_places(family, model):
    """Also those that the processor does not know as a place, but the model as a part of an image."""
    processor = family.processor()
    for token in {processor.image_token, processor.tokenizer.decode([model.config.image_token_id])}:
        for options in ({"text": f"A {token} b. {TEXT}"}, {"system": f"A {token} b."}):
            refused("the text has [134] places for images", model, processor, images=pictures(), **options)


def test_text_alone_is_compressed_with_a_processor(family, model):
    """Text is compressed alike before and after the model has read images."""
    processor = family.processor()
    before = compress(model, processor, TEXT, method="knorm", retention=0.5)
    answers = [before.ask(question, **OPTIONS) for question in QUESTIONS]
    model.generate(**family.encode("Another.", [picture(3, 64)]), max_new_tokens=2, pad_token_id=0)
    after = compress(model, processor, TEXT, method="knorm", retention=0.5)
    assert (
        [after.ask(question, **OPTIONS) for question in QUESTIONS] == answers == before.batch_ask(QUESTIONS, **OPTIONS)
    )
    assert before.ids == encode_continuation(processor.tokenizer, f"<s>user\n{TEXT}")
    assert encode_question(before.tokenizer, "Who?") == encode_continuation(
        processor.tokenizer, "\n\nWho?<end_of_utterance>\n<s>assistant\n"
    )


def refused(match: str, model: Any, processor: Any, error: type[LkvError] = PromptError, **options: Any) -> None:
    with pytest.raises(error, match=match):
        compress(model, processor, options.pop("text", TEXT), method="knorm", **options)


def test_what_cannot_work_is_one_sentence(qwen, tmp_path):
    model, processor = qwen
    one = [picture()]
    refused("images need the model's processor, but TokenizersBackend is a tokenizer", model, tokenizer(), images=one)
    refused("LlamaForCausalLM reads text only; leave images out", tiny_llama(), processor, images=one)
    refused("images is a Image; give a list of images", model, processor, images=one[0])
    refused("images is empty; give a list of images", model, processor, images=[])
    parts = conversation()
    refused("images need the model's processor", model, tokenizer(), text=parts)
    refused("LlamaForCausalLM reads text only", tiny_llama(), processor, text=parts)
    refused("in a conversation give .* parts", model, processor, text=parts, images=one)
    refused("a conversation has its system prompt among", model, processor, text=parts, system="Be brief.")
    refused("the processor refuses the images", model, processor, images=["no picture"])
    refused("images are read with their whole text at once; leave chunk out", model, processor, images=one, chunk=8)
    refused("protect names image 1, but there are 1 images", model, processor, images=one, protect=[1])
    refused("protect is 'pictures'; give 'images', or a list", model, processor, images=one, protect="pictures")
    refused("protected", model, processor, images=one, protect="images", retention=0.02)
    refused("protect is 'images'; give a list", model, processor, protect="images")
    plain = VISION[0].processor()
    plain.chat_template = None
    refused("has no chat template, which says where images go; put <image> into the text", model, plain, images=one)
    refused("messages in parts need a chat template", model, plain, text=parts)
    strange = VISION[2].processor()
    strange.tokenizer.image_token = "<fake_token_around_image>"
    strange.full_image_sequence = "<boi><eoi>"
    refused("the processor (refuses the images|puts no image tokens into the text)", model, strange, images=one)
    adjacent = "<image><image> and a text that follows them."
    refused(
        r"2 images are in 1 parts.*give protect='images'",
        model,
        processor,
        text=adjacent,
        images=pictures(),
        protect=[0],
    )
    context = compress(model, processor, TEXT, images=one, method="knorm")
    context.save(tmp_path / "text.kv")
    text_model = tiny_llama(vocab_size=300)
    with pytest.raises(ContextFileError, match="was saved by a model with"):
        Context.load(tmp_path / "text.kv", text_model, tokenizer())
    with pytest.raises(CacheError, match=r"ask\(\) sets position_ids itself"):
        context.ask("Who?", position_ids=torch.zeros(1, 1, dtype=torch.long))
    assert patch_attention(model).position_hook is not None

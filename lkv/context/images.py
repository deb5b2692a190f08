"""Texts with images, as a model's processor encodes them."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lkv.context.input_checks import image_of
from lkv.context.protection import Span, protected_tokens
from lkv.errors import PromptError, check_count
from lkv.hf.attention import input_device
from lkv.utils.prompts import Conversation, chat_template_parts, content_parts, context_parts, encode_context

IMAGES = "images"  # `protect=` for all images


def text_tokenizer(tokenizer: Any) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a processor, with the processor's chat template; a tokenizer is returned as it is."""
    own = getattr(tokenizer, "tokenizer", None)
    if own is None or not hasattr(tokenizer, "image_processor"):
        return tokenizer
    template = getattr(tokenizer, "chat_template", None)
    if template and own.chat_template != template:
        own = copy.copy(own)
        own.chat_template = template
    return own


def images_of(messages: Conversation) -> list[Any]:
    """Return the images of a conversation, in order."""
    return [image_of(part) for message in messages for part in content_parts(message) if part["type"] == "image"]


def encode_images(
    model: PreTrainedModel, processor: Any, text: str | Conversation, images: Any, system: str | None
) -> tuple[list[int], dict[str, Tensor]]:
    """Encode a text with images, up to the end of the text.

    Args:
        model: A model that reads images.
        processor: Its processor.
        text: The text, whose images come before it or where it has the processor's image token, or the conversation
            that the images are from.
        images: The images, as the processor takes them.
        system: A system prompt before them.

    Returns:
        The ids, and the other inputs of the model, such as `pixel_values`, in its dtype and on its device.

    Raises:
        PromptError: For a model or processor without images, and for images that the processor refuses.
    """
    image_token = _check_images(model, processor, images)
    placeholder, tokenizer = processor.image_token, text_tokenizer(processor)
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if isinstance(text, str) and placeholder not in text:
        if not has_template:
            raise PromptError(
                f"the processor has no chat template, which says where images go; put {placeholder} into the text for "
                "each."
            )
        prompt = chat_template_parts(tokenizer, system, len(images))[0] + text
    else:
        prompt = "".join(context_parts(tokenizer, text, system))
    # Gemma-3's model reads another token, and its processor has images at a third in older versions of transformers.
    tokens = {placeholder, getattr(processor, "boi_token", None) or placeholder, tokenizer.decode([image_token])}
    if (places := sum(map(prompt.count, tokens))) != len(images):
        raise PromptError(
            f"the text has {places} places for images ({placeholder}), but there are {len(images)} images; give as "
            "many, or none, and the images come before the text."
        )
    try:
        # A chat template writes special tokens itself.
        inputs = processor(text=[prompt], images=[*images], return_tensors="pt", add_special_tokens=not has_template)
    # Processors raise whatever their image libraries do.
    except Exception as error:
        raise PromptError(
            f"the processor refuses the images ({type(error).__name__}: {error}); give images as it takes them, such "
            "as those of PIL."
        ) from error
    ids: list[int] = inputs["input_ids"][0].tolist()
    if image_token not in ids:
        raise PromptError(
            f"the processor puts no image tokens into the text that {type(model).__name__} knows; load the model's "
            "own with AutoProcessor."
        )
    values = {name: torch.as_tensor(x) for name, x in inputs.items() if name not in ("input_ids", "attention_mask")}
    device = input_device(model)
    return ids, {name: x.to(device, model.dtype if x.is_floating_point() else None) for name, x in values.items()}


def _check_images(model: PreTrainedModel, processor: object, images: object) -> int:
    """Return the id of the model's image tokens; raises PromptError if it or the processor reads no images."""
    if not isinstance(images, list | tuple) or not images:
        kind = "empty" if isinstance(images, list | tuple) else f"a {type(images).__name__}"
        raise PromptError(f"images is {kind}; give a list of images, such as those of PIL.")
    image_token = getattr(model.config, "image_token_id", None)
    if not isinstance(image_token, int):
        raise PromptError(
            f"{type(model).__name__} reads text only; leave images out, or use a model with images, such as Qwen3-VL."
        )
    if not hasattr(processor, "image_processor"):
        raise PromptError(
            f"images need the model's processor, but {type(processor).__name__} is a tokenizer; give what "
            "AutoProcessor.from_pretrained loads."
        )
    if processor.image_processor is None or not isinstance(getattr(processor, "image_token", None), str):
        raise PromptError(
            f"{type(processor).__name__} has no image token or no image processor; load the model's own with "
            "AutoProcessor."
        )
    return image_token


def protected_in_images(
    model: PreTrainedModel,
    processor: object,
    ids: Sequence[int],
    text: str | Conversation,
    spans: object,
    system: str | None,
    images: int,
) -> list[int]:
    """Find the tokens of protected spans of a text with images.

    Args:
        model: The model that reads the images.
        processor: Its processor.
        ids: The ids of the text with its images.
        text: The text or conversation.
        spans: "images" for all image tokens, or a list of spans as in `protected_tokens` and of numbers of images.
        system: The system prompt before the text.
        images: The number of images.

    Returns:
        The numbers of the tokens among `ids`, in order.

    Raises:
        PromptError: As `protected_tokens`, for images that do not exist or cannot be told apart, and for words between
            images.
    """
    image_token: object = getattr(model.config, "image_token_id", None)
    is_image = [token == image_token for token in ids]
    if spans == IMAGES:
        return [place for place, own in enumerate(is_image) if own]
    if isinstance(spans, str) or not isinstance(spans, Sequence):
        raise PromptError(f"protect is {spans!r}; give 'images', or a list of words and of numbers of images.")
    words: list[Span] = [span for span in spans if not hasattr(span, "__index__")]
    numbers = [span for span in spans if hasattr(span, "__index__")]
    found = {place for number in numbers for place in _image_places(is_image, number, images)}
    tokenizer = text_tokenizer(processor)
    plain = encode_context(tokenizer, text, system)
    same_start, same_end = _common_start(ids, plain), _common_start(ids[::-1], plain[::-1])
    for place in protected_tokens(tokenizer, text, words, system):
        if place >= same_start and place < len(plain) - same_end:
            raise PromptError(
                f"protect names words between images ({tokenizer.decode(plain[place : place + 8])!r}); give words "
                "after the last image or before the first, or numbers of images."
            )
        found.add(place if place < same_start else len(ids) - len(plain) + place)
    return sorted(found)


def _image_places(is_image: list[bool], number: int, images: int) -> range:
    """Return the tokens of one of `images` images; PromptError if it does not exist or is in several parts."""
    starts = [place for place, own in enumerate(is_image) if own and not (place and is_image[place - 1])]
    problem = f"protect names image {number}, but there are {images} images; count them from 0."
    number = check_count(number, PromptError(problem), 0, images - 1)
    if len(starts) != images:
        raise PromptError(
            f"protect names image {number}, but the tokens of {images} images are in {len(starts)} parts, because the "
            "processor splits images or nothing is between them; give protect='images'."
        )
    start = starts[number]
    return range(start, next((end for end in range(start, len(is_image)) if not is_image[end]), len(is_image)))


def _common_start(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of equal ids at the start."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))

"""Compress pictures with a text, and ask about both.

python -m examples.images MODEL PICTURE...    (such as Qwen/Qwen3-VL-2B-Instruct chart.png)
python -m examples.images                     (a tiny random model: nothing is downloaded, its answer is noise)
"""

import sys
from typing import Any

import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    PreTrainedTokenizerFast,
)

import lkv

TEXT = "The pictures were taken on the pier, one in the morning and one in the evening. " * 8
SPECIAL = ["<pad>", "<eos>", "<start>", "<end>", "<boi>", "<image>", "<eoi>"]
TEMPLATE = (
    "{% for message in messages %}<start>{{ message.role }}\n{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ '<boi>' if part.type == 'image' else part.text }}{% endfor %}"
    "{% endif %}<end>\n{% endfor %}{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)


def main() -> None:
    if len(sys.argv) > 1:
        model = AutoModelForImageTextToText.from_pretrained(sys.argv[1], dtype="auto").eval()
        processor = AutoProcessor.from_pretrained(sys.argv[1])
        pictures: list[Image.Image] = [*map(Image.open, sys.argv[2:])]
    else:
        model, processor = tiny_model()
        pictures = [Image.new("RGB", (64, 48), colour) for colour in ("navy", "orange")]
    context = lkv.compress(model, processor, TEXT, images=pictures, method="snapkv", retention=0.3, protect="images")
    print(f"{context.tokens} tokens: {context.nbytes():,} bytes held, {context.full_nbytes():,} without eviction")
    print("Answer:", context.ask("When was the second picture taken?", max_new_tokens=8))


def tiny_model() -> tuple[Any, Any]:
    """Return a random Gemma-3 of two layers with its processor."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({name: number for number, name in enumerate([*SPECIAL, *letters])}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    names = {"boi_token": "<boi>", "image_token": "<image>", "eoi_token": "<eoi>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", extra_special_tokens=names
    )
    pixels = Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    processor = Gemma3Processor(pixels, tokenizer, TEMPLATE, image_seq_length=16)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": len(tokenizer),
        "layer_types": ["full_attention"] * 2,
    }
    torch.manual_seed(0)
    config = Gemma3Config(
        text_config=shape | text,
        vision_config=shape | {"image_size": 32, "patch_size": 4},
        mm_tokens_per_image=16,
        image_token_index=SPECIAL.index("<image>"),
    )
    return Gemma3ForConditionalGeneration(config).eval(), processor


if __name__ == "__main__":
    main()

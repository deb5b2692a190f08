"""Tiny random models that read images, with real processors, and pictures."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedTokenizerFast

from tests.families import _DELTA, _EXPERTS, _GLOBAL, _MIXED, _SHARED, _SHARED_EXPERT, SHAPE

IS_NEW = Version(transformers.__version__) >= Version("5.24")
_SPECIAL = {
    "image_token": "<image>", "boi_token": "<boi>", "eoi_token": "<eoi>", "video_token": "<video>",
    "vision_start_token": "<vs>", "vision_end_token": "<ve>", "start_image_token": "<boi>", "end_image_token": "<eoi>",
    "context_image_token": "<image>", "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>", "end_of_utterance_token": "<end_of_utterance>", "audio_token": "<audio>",
    "boa_token": "<boa>", "eoa_token": "<eoa>",
}  # fmt: skip
_NAMES = ["<pad>", "<s>", "</s>", *dict.fromkeys(_SPECIAL.values())]
TOKENS = {name: number for number, name in enumerate(_NAMES)}
_TEXT = SHAPE | {"vocab_size": len(_NAMES) + 256}
_VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4, "initializer_range": 0.3,
}  # fmt: skip
_QWEN_VISION = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "initializer_range": 0.3,
}  # fmt: skip
_QWEN_TOKENS = {
    "image_token_id": TOKENS["<image>"], "video_token_id": TOKENS["<video>"],
    "vision_start_token_id": TOKENS["<vs>"], "vision_end_token_id": TOKENS["<ve>"],
}  # fmt: skip
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
# Each turn begins and ends with a special token; contents are a text, or a list of parts.
_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}IMAGE"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
_PARTS_ONLY = _TEMPLATE.replace("{% if message['content'] is string %}{{ message['content'] }}{% else %}", "").replace(
    "{% endfor %}{% endif %}<end_of_utterance>", "{% endfor %}<end_of_utterance>"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of one token a byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = TOKENS | {letter: len(TOKENS) + index for index, letter in enumerate(letters)}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in _NAMES])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", extra_special_tokens=_SPECIAL
    )


def picture(seed: int = 0, width: int = 32, height: int = 16) -> Image.Image:
    """A picture of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@dataclass(frozen=True)
class VisionFamily:
    """`name` is the prefix of the classes in transformers; `image` what stands for one in a template."""

    name: str
    settings: dict[str, Any]
    make_processor: Callable[[], Any]
    image: str = "<image>"
    template: str = _TEMPLATE
    text: dict[str, Any] | None = None
    needs_new: bool = False
    variant: str = ""  # which models of this name

    @property
    def label(self) -> str:
        """The name, with the variant."""
        return f"{self.name} ({self.variant})" if self.variant else self.name

    @property
    def missing(self) -> str:
        """Why this version of transformers cannot run it with LKV, if it cannot."""
        return f"images of {self.name} need transformers 5.24" if self.needs_new and not IS_NEW else ""

    def build(self, dtype: torch.dtype = torch.float64) -> Any:
        """A tiny random model."""
        torch.manual_seed(0)
        config = getattr(transformers, f"{self.name}Config")(text_config=_TEXT | (self.text or {}), **self.settings)
        model = getattr(transformers, f"{self.name}ForConditionalGeneration")(config)
        if self.needs_new:
            model.set_experts_implementation("eager")  # the fused one knows no float64
        for name, weight in model.named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(weight, 0.5, 1.5)
        return model.to(dtype).eval()

    def processor(self) -> Any:
        """The family's processor."""
        own = self.make_processor()
        own.chat_template = self.template.replace("IMAGE", self.image)
        return own

    def encode(self, text: str, images: list[Image.Image]) -> dict[str, torch.Tensor]:
        """The inputs of the model, in float64, for a text after its images."""
        return self.encode_batch([(text, images)])

    def encode_batch(self, texts: list[tuple[str, list[Image.Image]]]) -> dict[str, torch.Tensor]:
        """The inputs for several texts, padded on the left."""
        processor = self.processor()
        processor.tokenizer.padding_side = "left"
        contents = [[*[{"type": "image"}] * len(images), {"type": "text", "text": text}] for text, images in texts]
        prompts = [processor.apply_chat_template([{"role": "user", "content": content}]) for content in contents]
        inputs = processor(
            text=prompts, images=[images for _, images in texts], return_tensors="pt", padding=True,
            add_special_tokens=False,
        )  # fmt: skip
        return {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}


def _without_videos(name: str, *parts: Any, **settings: Any) -> Any:
    """A processor of transformers without its parts for videos, which need torchvision, and for audio."""
    base = getattr(transformers, name)

    def check(self: Any, argument: str, value: Any) -> Any:
        if argument in ("video_processor", "feature_extractor"):
            return None
        return base.check_argument_for_proper_class(self, argument, value)

    return type(name, (base,), {"check_argument_for_proper_class": check})(*parts, None, **settings)


def _pixels(name: str, **settings: Any) -> Any:
    """An image processor that needs no torchvision."""
    return (getattr(transformers, f"{name}Pil", None) or getattr(transformers, name))(**settings)


def _qwen(name: str) -> Any:
    pixels = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    size = {"shortest_edge": 64, "longest_edge": 4096}
    images = _pixels("Qwen2VLImageProcessor", **pixels, size=size)
    return _without_videos(f"{name}Processor", images, tokenizer())


def _gemma() -> Any:
    images = _pixels("Gemma3ImageProcessor", size={"height": 16, "width": 16})
    return transformers.Gemma3Processor(images, tokenizer(), image_seq_length=4)


def _gemma4() -> Any:
    images = _pixels("Gemma4ImageProcessor", patch_size=4, max_soft_tokens=70, pooling_kernel_size=2)
    return _without_videos("Gemma4Processor", None, images, tokenizer())


def _llava() -> Any:
    size = {"height": 16, "width": 16}
    images = _pixels("CLIPImageProcessor", size=size, crop_size=size)
    return transformers.LlavaProcessor(
        images, tokenizer(), patch_size=4, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )


def _smolvlm() -> Any:
    size = {"longest_edge": 16}
    # SmolVLM's own processor is this one with videos, which need a package of their own.
    images = _pixels("Idefics3ImageProcessor", size=size, max_image_size=size, do_image_splitting=False)
    return transformers.Idefics3Processor(images, tokenizer(), image_seq_len=4)


def _internvl() -> Any:
    size = {"height": 16, "width": 16}
    images = _pixels("GotOcr2ImageProcessor", size=size, crop_to_patches=False)
    return _without_videos("InternVLProcessor", images, tokenizer(), image_seq_length=4)


VISION = [
    VisionFamily(
        "Qwen3VL",
        {"vision_config": _QWEN_VISION | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}}
        | _QWEN_TOKENS,
        lambda: _qwen("Qwen3VL"),
        "<vs><image><ve>",
        text={"rope_parameters": _MROPE},
    ),
    VisionFamily(
        "Qwen2_5_VL",
        {"vision_config": _QWEN_VISION | {"window_size": 16, "fullatt_block_indexes": [1]}} | _QWEN_TOKENS,
        lambda: _qwen("Qwen2_5_VL"),
        "<vs><image><ve>",
        needs_new=True,  # its rotary embedding takes three tables before
        text={"rope_parameters": _MROPE},
    ),
    VisionFamily(
        "Gemma3",
        {
            "vision_config": _VISION, "mm_tokens_per_image": 4, "image_token_index": TOKENS["<image>"],
            "boi_token_index": TOKENS["<boi>"], "eoi_token_index": TOKENS["<eoi>"],
        },
        _gemma,
        "<boi>",
        text={
            "num_hidden_layers": 4, "query_pre_attn_scalar": 8, "sliding_window": 12,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
    ),
    VisionFamily(
        "SmolVLM",
        {"vision_config": _VISION, "scale_factor": 2, "image_token_id": TOKENS["<image>"], "pad_token_id": 0},
        _smolvlm,
        template=_PARTS_ONLY,
        text={"model_type": "llama"},
    ),
    VisionFamily(
        "InternVL",
        {
            "vision_config": _VISION | {"image_size": [16, 16], "patch_size": [4, 4]},
            "image_token_id": TOKENS["<image>"], "image_seq_length": 4,
        },
        _internvl,
        needs_new=True,  # the processor needs NumPy 1 before
        text={"model_type": "qwen2"},
    ),
    VisionFamily(
        "Qwen2VL",
        {
            "vision_config": {
                "depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 1, "patch_size": 4,
                "spatial_merge_size": 2, "temporal_patch_size": 2, "initializer_range": 0.3,
            }
        }
        | _QWEN_TOKENS,
        lambda: _qwen("Qwen2VL"),
        "<vs><image><ve>",
        needs_new=True,
        text={"rope_parameters": _MROPE},
    ),
    *[
        VisionFamily(
            name,
            {"vision_config": _QWEN_VISION | {"num_position_embeddings": 16}} | _QWEN_TOKENS,
            lambda: _qwen("Qwen3VL"),
            "<vs><image><ve>",
            needs_new=True,
            text=_DELTA | {"rope_parameters": _MROPE | {"partial_rotary_factor": 0.5}} | more,
        )
        for name, more in {"Qwen3_5": {}, "Qwen3_5Moe": _SHARED_EXPERT}.items()
    ],
    VisionFamily(
        "Llava",
        {
            "vision_config": _VISION | {"model_type": "clip_vision_model"}, "image_token_id": TOKENS["<image>"],
            "image_seq_length": 16, "vision_feature_layer": -1,
        },
        _llava,
        needs_new=True,
        text={"model_type": "llama"},
    ),
    *[
        VisionFamily(
            "Gemma4",
            {
                "vision_config": _VISION
                | {"num_key_value_heads": 2, "head_dim": 8, "pooling_kernel_size": 2, "position_embedding_size": 64},
                "image_token_id": TOKENS["<image>"], "boi_token_id": TOKENS["<boi>"], "eoi_token_id": TOKENS["<eoi>"],
                "video_token_id": TOKENS["<video>"], "audio_token_id": TOKENS["<audio>"],
            },
            _gemma4,
            needs_new=True,
            text=text,
            variant=variant,
        )
        for variant, text in {
            "31B": _MIXED | _GLOBAL | {"use_bidirectional_attention": "vision"},
            "26B-A4B": _MIXED
            | _GLOBAL
            | _EXPERTS
            | {"use_bidirectional_attention": "vision", "enable_moe_block": True, "top_k_experts": 2},
            "E2B, E4B": _SHARED | {"global_head_dim": 16, "vocab_size_per_layer_input": len(_NAMES) + 256},
        }.items()
    ],
]  # fmt: skip


class _ExactStates(TorchFunctionMode):
    """Recurrent layers copy their inputs to float32 before they add up; in here, float64 stays float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.to and args[1:] == (torch.float32,) and "memory_format" in kwargs:
            args = (args[0], args[0].dtype)
        return func(*args, **kwargs)


def exact_states(family: VisionFamily) -> Any:
    """A block in which the states of a family are exact, too."""
    return _ExactStates() if family.name.startswith("Qwen3_5") else nullcontext()


_QUICK = "Qwen3VL", "Gemma3"  # positions of several dimensions, and images that see themselves
PARAMS = [
    pytest.param(family, id=family.label, marks=[] if family.name in _QUICK else [pytest.mark.slow])
    for family in VISION
]
# Contexts know no more of a model than that it has images, states or layers that share keys.
CONTEXT_PARAMS = [param for param in PARAMS if param.id in (*_QUICK, "SmolVLM", "Qwen3_5", "Gemma4 (E2B, E4B)")]

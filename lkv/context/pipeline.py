"""The pipeline `lkv-text-generation`: a context and questions in, answers out."""

from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from transformers import AutoModelForCausalLM, Pipeline
from transformers.pipelines import PIPELINE_REGISTRY

from lkv.context.compression import compress
from lkv.errors import LkvError, PromptError
from lkv.hf.loading import DEFAULT, load_model
from lkv.methods.request import CompressionRequest

TASK = "lkv-text-generation"
# Options of `compress`, including rejected ones, for which `compress` gives the reason.
_COMPRESSION = {*(field.name for field in fields(CompressionRequest)), "compression_ratio"}
_COMPRESSION |= {"system", "protect", "progress"}


class ContextQuestionPipeline(Pipeline):
    """Compress a context once and answer questions about it.

    `pipe(context, question=...)` returns `{"answer": str}`, `pipe(context, questions=[...])` returns
    `{"answers": [str, ...]}`; a list of contexts gives a list of these. A context is a text or a conversation. Options
    are those of `lkv.compress` and of `Context.ask`.
    """

    _load_processor: Any = False
    _load_image_processor: Any = False
    _load_feature_extractor: Any = False
    _load_tokenizer: Any = True

    def __call__(self, inputs: Any, *args: Any, batch_size: int | None = None, **kwargs: Any) -> Any:
        """Return the answers about a context, or about each context of a list. Raises PromptError without any."""
        if isinstance(inputs, list | tuple) and not inputs:
            raise PromptError("there is no context in the list; give one text, or a list of texts.")
        if (batch_size or self._batch_size or 1) != 1:
            raise PromptError("contexts are compressed one at a time; leave batch_size out.")
        return super().__call__(inputs, *args, **kwargs)

    def _sanitize_parameters(self, **options: object) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        return {}, options, {}

    def preprocess(self, input_: object, **preprocess_parameters: object) -> dict[str, Any]:
        """Return the context, as `forward` takes it. Raises PromptError for anything but a text or a conversation."""
        messages = getattr(input_, "messages", None)  # of what transformers makes of a conversation
        if messages is None and not isinstance(input_, str):
            raise PromptError(f"the context is a {type(input_).__name__}; give one text, or a list of texts.")
        return {"context": messages or input_}

    def _forward(self, input_tensors: Any, **options: Any) -> Any:
        question, questions = options.pop("question", None), options.pop("questions", None)
        is_list = questions is None or (isinstance(questions, Iterable) and not isinstance(questions, str))
        if (question is None) == (questions is None) or not is_list:
            raise PromptError("give question='...' for one answer, or questions=[...] for several.")
        compression = {name: options.pop(name) for name in _COMPRESSION if name in options}
        context = compress(self.model, cast(Any, self.tokenizer), input_tensors["context"], **compression)
        if questions is None:
            return {"answer": context.ask(question, **options)}
        return {"answers": [context.ask(each, **options) for each in questions]}

    def postprocess(self, model_outputs: object, **postprocess_parameters: object) -> Any:
        """Return the answers as they are."""
        return model_outputs


PIPELINE_REGISTRY.register_pipeline(TASK, ContextQuestionPipeline, pt_model=AutoModelForCausalLM, type="text")


def pipeline(model: Any = None, tokenizer: Any = None, **options: Any) -> ContextQuestionPipeline:
    """Make the pipeline `lkv-text-generation` of transformers.

    ```python
    pipe = lkv.pipeline(memory=0.1)
    pipe(text, question="Who built the harbour?")["answer"]
    pipe(text, questions=["Who built the harbour?", "When?"], max_new_tokens=20)["answers"]
    ```

    Args:
        model: A model, or what `lkv.load_model` loads (a folder, GGUF file or hub id); the demo model by default.
        tokenizer: Its tokenizer; by default from the same folder, file or hub id.
        **options: Options of transformers' `pipeline`, and defaults for each call: options of `lkv.compress` and
            `Context.ask`. If `model` is a name, `dtype`, `revision` and `device_map` (as `device`) go to
            `lkv.load_model`.

    Returns:
        A pipeline to call with a context, or a list of contexts, and `question=` or `questions=`.
    """
    if model is None or isinstance(model, str | Path):
        dtype, revision, device = (options.pop(name, None) for name in ("dtype", "revision", "device_map"))
        if isinstance(dtype, str):
            dtype = None if dtype == "auto" else getattr(torch, dtype, dtype)
        if not isinstance(dtype, torch.dtype | None):
            raise LkvError(f"dtype is {dtype!r}; give one of torch, such as torch.bfloat16 or 'bfloat16'.")
        if not isinstance(device, str | torch.device | None):
            raise LkvError(f"device_map is {device!r}; give 'auto' or one device, or load the model yourself.")
        model, own_tokenizer = load_model(DEFAULT if model is None else str(model), dtype, revision, device)
        tokenizer = own_tokenizer if tokenizer is None else tokenizer
    make: Any = transformers.pipeline  # its overloads list transformers' own tasks only
    return make(TASK, model=model, tokenizer=tokenizer, **options)

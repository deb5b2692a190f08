"""The pipeline `lkv-text-generation`: a context and questions in, answers out."""

from inspect import signature
from typing import Any, cast

import transformers
from transformers import AutoModelForCausalLM, Pipeline
from transformers.pipelines import PIPELINE_REGISTRY

from lkv.cache.ragged_cache import RaggedCache
from lkv.context.compression import compress
from lkv.errors import PromptError
from lkv.models.loading import DEFAULT, load_model

TASK = "lkv-text-generation"
# What `compress` takes; of options that it refuses it says why.
_COMPRESSION = (signature(compress).parameters.keys() | signature(RaggedCache).parameters.keys()) - {
    "model", "tokenizer", "text", "options"
}  # fmt: skip


class ContextQuestionPipeline(Pipeline):
    """Compress a context once and answer questions about it, none of which was known before.

    `pipe(context, question=...)` returns `{"answer": str}`, `pipe(context, questions=[...])` returns
    `{"answers": [str, ...]}`; a list of contexts gives a list of these. Options are those of `lkv.compress` and of
    `Context.ask`.
    """

    _load_processor: Any = False
    _load_image_processor: Any = False
    _load_feature_extractor: Any = False
    _load_tokenizer: Any = True

    def _sanitize_parameters(self, **options: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        return {}, options, {}

    def preprocess(self, input_: Any, **preprocess_parameters: Any) -> dict[str, Any]:
        """The context, as `forward` takes it. Raises PromptError for anything but a text."""
        if not isinstance(input_, str):
            raise PromptError(f"the context is a {type(input_).__name__}; give one text, or a list of texts.")
        return {"context": input_}

    def _forward(self, input_tensors: Any, **options: Any) -> Any:
        question, questions = options.pop("question", None), options.pop("questions", None)
        if (question is None) == (questions is None) or isinstance(questions, str):
            raise PromptError("give question='...' for one answer, or questions=[...] for several.")
        compression = {name: options.pop(name) for name in _COMPRESSION if name in options}
        context = compress(self.model, cast(Any, self.tokenizer), input_tensors["context"], **compression)
        if questions is None:
            return {"answer": context.ask(question, **options)}
        return {"answers": [context.ask(each, **options) for each in questions]}

    def postprocess(self, model_outputs: Any, **postprocess_parameters: Any) -> Any:
        """The answers as they are."""
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
        model: A model, its folder or its hub id; the embedded one by default.
        tokenizer: Its tokenizer; that of the folder or hub id by default.
        **options: Those of transformers' `pipeline`, and defaults of each call: options of `lkv.compress` and of
            `Context.ask`.

    Returns:
        A pipeline to call with a context, or a list of contexts, and `question=` or `questions=`.
    """
    if model is None:
        model, tokenizer = load_model(DEFAULT)
    make: Any = transformers.pipeline  # its overloads know the tasks of transformers alone
    return make(TASK, model=model, tokenizer=tokenizer, **options)

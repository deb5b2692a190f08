"""A small random model with a policy, as vLLM and as transformers have it; the latter is the oracle."""

import gc
import random
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm import LLM, EngineArgs, SamplingParams

from lkv.context.compression import compress as compress_with_transformers
from lkv.context.context import Context
from lkv.hf.spec import inspect_model
from lkv.policy.policy import Policy
from tests import families

RETENTION = 0.4
# vLLM's CPU kernels want heads of 32 channels; large weights make attention far from uniform.
SHAPE = {"hidden_size": 128, "head_dim": 32, "initializer_range": 0.2, "max_position_embeddings": 2048}


class Lab:
    """The model of one family in a folder, its tokenizer, its policy, and a store of contexts."""

    _shared: "tuple[Lab, LLM, ExitStack] | None" = None

    def __init__(self, folder: Path, family: str):
        self.folder, self.store = folder / "model", folder / "store"
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {letter: number for number, letter in enumerate(["<pad>", "<s>", "</s>", *letters])}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
        )
        self.tokenizer.save_pretrained(self.folder)
        self.model = families.build(family, torch.float32, **SHAPE, vocab_size=len(vocabulary))
        self.model.save_pretrained(self.folder)
        torch.manual_seed(5)
        self.policy = Policy(inspect_model(self.model))
        torch.nn.init.normal_(self.policy.heads.embeddings, std=20.0)
        self.policy.save_pretrained(folder / "policy")
        self.settings = {
            "store": str(self.store), "policy": str(folder / "policy"), "retention": RETENTION, "contexts_memory": 64.0,
        }  # fmt: skip

    @contextmanager
    def engine(self, settings: dict[str, Any] | None = None, **options: Any):
        """An engine of vLLM, with other settings of the plugin and other options of vLLM."""
        options = {
            "dtype": "float32", "enforce_eager": True, "max_model_len": 1024, "max_num_seqs": 16, "seed": 0,
            "additional_config": {"lkv": self.settings | (settings or {})}, **options,
        }  # fmt: skip
        self.close_shared()
        llm = LLM(str(self.folder), **options)
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()

    @property
    def shared(self) -> LLM:
        """One engine for consecutive tests."""
        if Lab._shared is None or Lab._shared[0] is not self:
            Lab.close_shared()
            stack = ExitStack()
            Lab._shared = self, stack.enter_context(self.engine()), stack
        return Lab._shared[1]

    @classmethod
    def close_shared(cls) -> None:
        """End the shared engine: a process has one at a time."""
        shared, cls._shared = cls._shared, None
        if shared is not None:
            shared[2].close()

    def config(self, settings: dict[str, Any] | None = None, **options: Any) -> Any:
        """vLLM's configuration of such an engine."""
        extra = {"lkv": self.settings | (settings or {})}
        arguments = EngineArgs(
            str(self.folder), dtype="float32", max_model_len=1024, additional_config=extra, **options
        )
        return arguments.create_engine_config()

    def text(self, seed: int, tokens: int = 200) -> str:
        """Words of random letters, one token a byte."""
        draw = random.Random(seed)
        words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(1, 8))) for _ in range(tokens)]
        return " ".join(words)[:tokens]

    def context(self, text: str, retention: float = RETENTION) -> Context:
        """What transformers makes of a text."""
        return compress_with_transformers(
            self.model, self.tokenizer, text, retention=retention, policy=self.policy
        )  # fmt: skip

    def answer(self, context: Context | None, ids: list[int], tokens: int) -> list[int]:
        """The oracle's greedy answer."""
        if context is not None:
            return context.complete(ids, tokens)
        out = self.model.generate(torch.tensor([ids]), max_new_tokens=tokens, do_sample=False)
        return out[0, len(ids) :].tolist()

    def beams(self, context: Context | None, ids: list[int], width: int, tokens: int) -> tuple[list[list[int]], Any]:
        """The oracle's beams of `tokens` tokens, whatever they are, and their log-probabilities."""
        row, cache = ids, None
        if context is not None:
            row, cache = context.ids + ids, context.cache.fork()
            cache.batch_repeat_interleave(width)
        out = self.model.generate(
            torch.tensor([row]), past_key_values=cache, num_beams=width, num_return_sequences=width,
            max_new_tokens=tokens, do_sample=False, eos_token_id=-1, length_penalty=0.0, return_dict_in_generate=True,
            output_scores=True,
        )  # fmt: skip
        return out.sequences[:, len(row) :].tolist(), out.sequences_scores


def ask(llm: LLM, ids: list[int], context: str | None, tokens: int = 16, **options: Any) -> list[int]:
    """The greedy answer of an engine."""
    (output,) = llm.generate({"prompt_token_ids": ids}, asked(context, tokens, **options), use_tqdm=False)
    return list(output.outputs[0].token_ids)


def asked(context: str | None, tokens: int = 16, **options: Any) -> SamplingParams:
    """Greedy decoding, about a context."""
    extra = None if context is None else {"lkv_context": context}
    return SamplingParams(**{"temperature": 0.0, "max_tokens": tokens, "extra_args": extra} | options)


def forget(llm: LLM) -> None:
    """Empty the worker's memory of contexts, so that files are read."""
    for name in llm.collective_rpc("lkv_statistics")[0]["resident"]:
        llm.collective_rpc("lkv_release", args=(name,))

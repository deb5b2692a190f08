"""RaggedCache: every KV head holds a span of its own length, and what is evicted is freed."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lkv.embedded import default_policy
from lkv.errors import CacheError, PromptError, check_retention
from lkv.hooks import Cache, HookedLayer
from lkv.methods import Method, make_method, needs_policy
from lkv.modeling import attach, has_padding
from lkv.ops.ragged_attention import ragged_attention
from lkv.policy import Policy
from lkv.prefill import PromptLayer

_CPU_SLACK, _GPU_SLACK = 32, 256


class RaggedCache(Cache):
    """A transformers cache that evicts layer by layer while the prompt is read.

    The prompt is the first forward pass; each layer attends over it in full, then keeps what its method chooses and
    frees the rest. Everything after that (question, generated tokens) is appended and kept.
    """

    def __init__(
        self,
        model: Any,
        policy: Policy | None = None,
        retention: float = 0.15,
        method: str | Method = "lkv",
        slack: int | None = None,
    ):
        """`policy` defaults to the one shipped for the embedded model; `method` is a name of `methods.NAMES` or a
        `Method` of your own; `slack` is the room in tokens that each head gets for what is appended.

        Raises RetentionError, PolicyMismatchError, UnsupportedModelError or LkvError (unknown method).
        """
        self.spec = attach(model)
        if getattr(model.generation_config, "prefill_chunk_size", None):
            raise CacheError("prefill_chunk_size does not work with RaggedCache yet: unset it in generation_config.")
        if isinstance(method, str):
            if needs_policy(method):
                policy = policy if policy is not None else default_policy()
                policy.check_model(self.spec)
                policy.to(model.device)
            method = make_method(method, retention, policy)
            self._least_share = check_retention(retention)
        else:
            self._least_share = 1.0
        if slack is not None and slack < 0:
            raise CacheError(f"slack is {slack}, but it is a number of tokens: give 0 or more, or None.")
        self.method, self.retention = method, retention
        self.ragged = [RaggedLayer(index, method, slack) for index in range(self.spec.layers)]
        super().__init__(layers=[*self.ragged])

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        if layer_idx == 0:
            tokens = self.get_seq_length() + key_states.shape[2]
            self._check_use(key_states.shape[0])
            if not self.prompt_length and tokens * self._least_share < 1:
                raise PromptError(
                    f"the prompt has {tokens} tokens: at retention {self.retention} nothing of it would be kept. Give "
                    f"at least {math.ceil(1 / self._least_share)} tokens, or a higher retention."
                )
            if tokens > self.spec.max_positions:
                raise PromptError(
                    f"the text would reach {tokens} tokens, but the model reads at most {self.spec.max_positions}; "
                    "shorten it, or generate fewer tokens."
                )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def _check_use(self, rows: int) -> None:
        held = self.ragged[0].kept.shape[0]
        if held and rows != held:
            raise CacheError(
                f"this cache holds {held} rows, but {rows} were given: beam search and several sequences a prompt do "
                "not work yet. Generate one sequence a row."
            )
        if len({(layer.prompt_length, layer.get_seq_length()) for layer in self.ragged}) > 1:
            raise CacheError(
                "an interrupted forward pass left the layers of this cache unequal; call rewind() if the prompt was "
                "complete, else reset() and read the prompt again."
            )

    def activate_past_recording(self) -> None:
        """Assisted decoding asks for this first; its candidates would be compressed with the prompt."""
        raise CacheError("assisted decoding does not work with RaggedCache yet; use greedy decoding or sampling.")

    def fill(self, prompt: list[PromptLayer]) -> None:
        """Take over a prompt that was read before (`prefill.read_prompt`): one prefill serves many methods."""
        for layer, whole in zip(self.ragged, prompt, strict=True):
            layer.fill(whole)

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt that was compressed (0 before the first forward pass)."""
        return self.ragged[-1].prompt_length

    def rewind(self) -> None:
        """Forget everything appended after the prompt."""
        for layer in self.ragged:
            layer.crop(layer.prompt_length - layer.get_seq_length())

    def kept(self) -> list[list[int]]:
        """Prompt entries held by each head, [L][H], summed over the batch."""
        return [layer.kept.sum(0).tolist() for layer in self.ragged]

    def realised_retention(self) -> float:
        """Prompt entries held divided by all of them."""
        every = sum(layer.kept.numel() for layer in self.ragged) * self.prompt_length
        return sum(int(layer.kept.sum()) for layer in self.ragged) / every if every else 1.0

    def nbytes(self) -> int:
        """Bytes of k and v storage really held, slack included."""
        return sum(layer.nbytes() for layer in self.ragged)

    def full_nbytes(self) -> int:
        """Bytes that an uncompressed cache would hold for the same tokens."""
        return sum(layer.full_nbytes() for layer in self.ragged)


class RaggedLayer(HookedLayer):
    """One layer: flat pools [P, d] of k and v in which each (batch, KV head) owns one span with slack at its end.

    Appends are equal for all heads, so the tail's length is one integer.
    """

    is_croppable = True

    def __init__(self, index: int, method: Method, slack: int | None = None):
        super().__init__()
        self._index, self._method, self._slack_asked = index, method, slack
        self.reset()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        default = _CPU_SLACK if key_states.device.type == "cpu" else _GPU_SLACK
        self._slack = default if self._slack_asked is None else self._slack_asked

    def fill(self, prompt: PromptLayer) -> None:
        """Evict from k and v computed before."""
        self.lazy_initialization(prompt.key, prompt.value)
        self._evict(prompt.query, prompt.key, prompt.value, prompt.scale)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.prompt_length:
            # What is stored belongs to no autograd graph: a cache that held one would hold every activation.
            self._append(key_states.detach(), value_states.detach())
        return self.tag(key_states), value_states

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float, stock: Callable[[], Tensor]
    ) -> Tensor:
        if has_padding(mask):
            raise CacheError("the batch holds padding; give prompts of one length, or one at a time.")
        if not self.prompt_length:
            out = stock()
            self._evict(query.detach(), key.detach(), value.detach(), scale)
            return out
        lens = self._lens + self._tail
        return ragged_attention(query, self.k_pool, self.v_pool, self._starts, lens, scale).transpose(1, 2)

    def _evict(self, query: Tensor | None, key: Tensor, value: Tensor, scale: float) -> None:
        """Keep the best tokens of each head and drop the rest (Sec. 3.4, inference)."""
        batch, tokens = key.shape[0], key.shape[2]
        scores = self._method.selector.scores(self._index, query, key, value, scale)
        kept = torch.tensor(self._method.budget.counts(self._index, scores))
        self._allocate(kept, self._slack, key, value)
        self.kept, self.prompt_length = kept, tokens
        for b in range(batch):
            for h, count in enumerate(kept[b].tolist()):
                start = int(self._starts[b, h])
                if count == tokens:
                    chosen: Any = slice(None)
                else:
                    chosen = scores[b, h].topk(count, sorted=False).indices.sort().values
                self.k_pool[start : start + count] = key[b, h, chosen]
                self.v_pool[start : start + count] = value[b, h, chosen]

    def _allocate(self, lens: Tensor, room: int, key: Tensor, value: Tensor) -> None:
        """New pools for spans of `lens` [B, H] entries, each with `room` for more; shaped like `key` and `value`."""
        ends = (lens + room).flatten().cumsum(0)
        starts = ends - lens.flatten() - room
        size = int(ends[-1])
        # Both pools first: where memory is short the layer stays as it was.
        k_pool, v_pool = key.new_empty((size, key.shape[-1])), value.new_empty((size, value.shape[-1]))
        self.k_pool, self.v_pool, self._room = k_pool, v_pool, room
        self._lens = lens.to(key.device, torch.int32)
        self._starts = starts.view_as(lens).to(key.device, torch.int32)

    def _append(self, key: Tensor, value: Tensor) -> None:
        """Scatter new k, v [B, H, n, d] to the ends of the spans."""
        new = key.shape[2]
        if new > self._room:
            self._relay(new)
        places = (self._starts + self._lens + self._tail)[..., None] + torch.arange(new, device=key.device)
        self.k_pool[places] = key
        self.v_pool[places] = value
        self._tail += new
        self._room -= new

    def _relay(self, new: int) -> None:
        """Lay this layer's spans out again with room for `new` entries and fresh slack."""
        keys, values, starts = self.k_pool, self.v_pool, self._starts.tolist()
        kept, tail = self._lens.cpu(), self._tail
        self._allocate(kept + tail, self._slack + new, keys, values)
        for row in range(kept.shape[0]):
            for h, length in enumerate((kept[row] + tail).tolist()):
                old, start = starts[row][h], int(self._starts[row, h])
                self.k_pool[start : start + length] = keys[old : old + length]
                self.v_pool[start : start + length] = values[old : old + length]
        self._lens -= tail

    def get_seq_length(self, *args: Any) -> int:
        """Logical length: positions seen, evicted ones included."""
        return self.prompt_length + self._tail

    def crop(self, tokens_to_remove: int) -> None:
        """Cut `-tokens_to_remove` (<= 0, as in transformers >= 5.17) tokens off the tail.

        Raises CacheError where the cut would reach into the compressed prompt.
        """
        cut = -tokens_to_remove
        if not 0 <= cut <= self._tail:
            raise CacheError(
                f"{cut} tokens cannot be cut off: only the {self._tail} after the compressed prompt can; "
                "give a number between minus that and 0."
            )
        self._tail -= cut
        self._room += cut

    def reset(self) -> None:
        """Forget everything, and free it."""
        self.k_pool = self.v_pool = torch.empty(0, 0)
        self.kept = torch.zeros(0, 0, dtype=torch.long)
        self.prompt_length = self._tail = self._room = 0
        self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise CacheError("beam search does not work with RaggedCache yet; use greedy decoding or sampling.")

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise CacheError("repeating a RaggedCache does not work yet; generate one sequence at a time.")

    def batch_select_indices(self, indices: Tensor) -> None:
        raise CacheError("selecting rows of a RaggedCache does not work yet; generate one prompt at a time.")

    def offload(self) -> None:
        raise CacheError("RaggedCache does not offload; lower the retention instead.")

    def nbytes(self) -> int:
        """Bytes of storage behind the two pools."""
        return self.k_pool.untyped_storage().nbytes() + self.v_pool.untyped_storage().nbytes()

    def full_nbytes(self) -> int:
        """Bytes of k and v of all tokens, had none been evicted."""
        entry = (self.k_pool.shape[-1] + self.v_pool.shape[-1]) * self.k_pool.element_size()
        return self.kept.numel() * self.get_seq_length() * entry

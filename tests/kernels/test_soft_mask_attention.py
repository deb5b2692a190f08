"""Soft-masked attention: the augmented column against the formula of App. B, values and gradients."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lkv.kernels.soft_mask_attention import continuation_attention, cpu, soft_mask_attention


def inputs(batch, kv_heads, groups, rows, length, dim, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    q = torch.randn(batch, kv_heads * groups, rows, dim, dtype=dtype)
    k, v = (torch.randn(batch, kv_heads, length, dim, dtype=dtype) for _ in "kv")
    log_mask = -torch.rand(batch, kv_heads, length, dtype=torch.promote_types(dtype, torch.float32)) * 12
    return [x.requires_grad_() for x in (q, k, v, log_mask)]


shapes = st.tuples(
    st.integers(1, 2), st.integers(1, 3), st.integers(1, 3), st.integers(1, 9), st.integers(0, 20),
    st.sampled_from([8, 12, 64]),
)  # fmt: skip


@given(shapes)
def test_values_and_gradients_equal_the_reference(shape):
    batch, kv_heads, groups, rows, older, dim = shape
    arguments = inputs(batch, kv_heads, groups, rows, rows + older, dim)
    outs = [soft_mask_attention(*arguments, backend=backend) for backend in ("sdpa", "reference")]
    torch.testing.assert_close(*outs, atol=1e-12, rtol=1e-12)
    grads = [torch.autograd.grad(out.sin().sum(), arguments) for out in outs]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-11, rtol=1e-11)


def test_is_the_multiplicative_form_of_the_paper():
    """App. B: raw softmax, times m, renormalised."""
    q, k, v, log_mask = inputs(1, 1, 1, 1, 6, 8)
    raw = torch.softmax(q @ k.transpose(-1, -2) * 8**-0.5, -1) * log_mask.exp()[:, :, None]
    expected = raw / raw.sum(-1, keepdim=True) @ v
    torch.testing.assert_close(soft_mask_attention(q, k, v, log_mask), expected)


def test_mask_gradient_has_no_small_divisor():
    """With m = e^-300 (zero in float32) the gradient with respect to log m is finite, and zero."""
    q, k, v, _ = inputs(1, 2, 2, 3, 10, 8, torch.float32)
    log_mask = torch.zeros(1, 2, 10)
    log_mask[..., :4] = -300.0
    log_mask.requires_grad_()
    soft_mask_attention(q, k, v, log_mask).square().sum().backward()
    assert bool(log_mask.grad.isfinite().all())
    assert float(log_mask.grad[..., :4].abs().max()) == 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_error_is_that_of_eager_attention(dtype):
    exact = inputs(2, 3, 3, 16, 80, 64)
    half = [x.detach().to(dtype) for x in exact[:3]]
    log_mask = exact[3].detach()
    truth = soft_mask_attention(*(x.double() for x in half), log_mask, backend="reference")
    ours = (soft_mask_attention(*half, log_mask.float()).double() - truth).abs().max()
    eager = (soft_mask_attention(*half, log_mask.to(dtype), backend="reference").double() - truth).abs().max()
    assert float(ours) <= 1.5 * float(eager)


def continuations(rows, tokens, prompts, dim=16, value_dim=16, dtype=torch.float64):
    """Three continuations of two KV heads and six query heads, their prompts, the mask and the prompts' numbers."""
    torch.manual_seed(rows)
    own = [torch.randn(3, heads, rows, width, dtype=dtype) for heads, width in ((6, dim), (2, dim), (2, value_dim))]
    prompt = [torch.randn(prompts, 2, tokens, width, dtype=dtype) for width in (dim, value_dim)]
    log_mask = -12 * torch.rand(3, 2, tokens, dtype=torch.promote_types(dtype, torch.float32))
    log_mask[:, :, ::3] = -torch.inf
    log_mask[1, 1] = -torch.inf  # a head that has nothing of its prompt
    learned = [x.requires_grad_() for x in (*own, log_mask)]
    return learned, prompt, torch.tensor([0, prompts - 1, 0]) if prompts > 1 else None


@pytest.mark.parametrize("most_scores", [1, 2**8, 2**19])
@pytest.mark.parametrize(("rows", "tokens", "prompts"), [(1, 1, 1), (5, 40, 1), (7, 3, 2), (4, 33, 2), (3, 0, 1)])
@pytest.mark.parametrize("value_dim", [16, 8])
def test_continuations_on_a_cpu_equal_the_formula(monkeypatch, most_scores, rows, tokens, prompts, value_dim):
    monkeypatch.setattr(cpu, "_MOST_SCORES", most_scores)
    (*own, log_mask), prompt, owners = continuations(rows, tokens, prompts, value_dim=value_dim)
    outs = [
        continuation_attention(*own, *prompt, log_mask, owners, 0.3, backend=backend)
        for backend in ("auto", "reference")
    ]
    torch.testing.assert_close(*outs, atol=1e-12, rtol=1e-12)
    grads = [torch.autograd.grad(out.sin().sum(), [*own, log_mask]) for out in outs]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-11, rtol=1e-11)


def softmax_by_hand(own, prompt, log_mask, owners, scale, sinks=None, softcap=None):
    """One continuation and query head after another, with every logit in full."""
    (q, key, value), outs = own, []
    for row, owner in enumerate([0] * len(q) if owners is None else owners.tolist()):
        for head in range(q.shape[1]):
            group, rows = head // 3, q.shape[2]
            k, v = (
                torch.cat([old[owner, group], new[row, group]]) for old, new in zip(prompt, (key, value), strict=True)
            )
            logits = q[row, head] @ k.T * scale
            logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
            logits = logits + torch.nn.functional.pad(log_mask[row, group], (0, rows))
            hidden = torch.ones_like(logits, dtype=torch.bool).triu(len(k) - rows + 1)
            logits = logits.masked_fill(hidden, -torch.inf)
            if sinks is not None:
                logits, v = torch.cat([logits, sinks[head].expand(rows, 1)], 1), torch.cat([v, torch.zeros_like(v[:1])])
            outs.append(logits.softmax(-1) @ v)
    return torch.stack(outs).unflatten(0, q.shape[:2])


@pytest.mark.parametrize("backend", ["auto", "sdpa", "reference"])
@pytest.mark.parametrize("prompts", [1, 2])
@pytest.mark.parametrize("is_capped", [True, False])
def test_sinks_and_caps(backend, prompts, is_capped):
    """Values and gradients of continuations and of whole sequences."""
    (*own, log_mask), prompt, owners = continuations(4, 9, prompts)
    options = {"softcap": 0.8} if is_capped else {"sinks": torch.linspace(-2, 4, 6, dtype=torch.float64)}
    given = (*own, log_mask)
    expected = softmax_by_hand(own, prompt, log_mask, owners, 0.9, **options)
    if is_capped and backend == "sdpa":
        with pytest.raises(ValueError, match="Capped scores are computed by the backend 'reference' only"):
            continuation_attention(*own, *prompt, log_mask, owners, 0.9, backend, **options)
        return
    found = [continuation_attention(*own, *prompt, log_mask, owners, 0.9, backend, **options)]
    if prompts == 1:
        k, v = (torch.cat([old.expand(3, -1, -1, -1), new], 2) for old, new in zip(prompt, own[1:], strict=True))
        mask = torch.nn.functional.pad(log_mask, (0, 4))
        found.append(soft_mask_attention(own[0], k, v, mask, 0.9, backend, **options))
    theirs = torch.autograd.grad(expected.sin().sum(), given)
    for out in found:
        torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
        for ours, exact in zip(torch.autograd.grad(out.sin().sum(), given), theirs, strict=True):
            torch.testing.assert_close(ours, exact, atol=1e-11, rtol=1e-11)
    with pytest.raises(ValueError, match="and without sinks"):
        continuation_attention(*own, *prompt, owners=owners, softcap=1.0, sinks=torch.zeros(6))


@pytest.mark.parametrize("prompts", [1, 2])
def test_the_full_cache_needs_no_mask(prompts):
    (*own, log_mask), prompt, owners = continuations(5, 20, prompts)
    outs = [
        continuation_attention(*own, *prompt, mask, owners, backend=backend)
        for mask, backend in ((None, "auto"), (torch.zeros_like(log_mask), "reference"))
    ]
    torch.testing.assert_close(*outs, atol=1e-12, rtol=1e-12)
    grads = [torch.autograd.grad(out.sin().sum(), own) for out in outs]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("lowest", [-60.0, -100.0, -1e4])
def test_continuations_on_a_cpu_compute_with_no_denormal_numbers(lowest):
    """Exponentials that underflow take a CPU a hundred times as long: nearly evicted tokens have the gradient 0."""
    (*own, log_mask), prompt, owners = continuations(5, 40, 2, dtype=torch.float32)
    low = torch.where(log_mask.detach() < -6, lowest, 0.0).requires_grad_()
    out = continuation_attention(*own, *prompt, low, owners)
    *gradients, d_mask = torch.autograd.grad(out.square().sum(), [*own, low])
    assert bool((d_mask[low == lowest] == 0).all())
    for x in (out, *gradients, d_mask):
        assert bool(((x == 0) | (x.abs() >= torch.finfo(torch.float32).tiny)).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_of_continuations_is_that_of_the_stock_kernel(dtype):
    """Values and gradients, against the formula in float64."""
    (*own, log_mask), prompt, owners = continuations(16, 200, 2, 64, 64, dtype)
    results = []
    for backend, precision in (("reference", torch.float64), ("sdpa", dtype), ("auto", dtype)):
        tensors = [x.detach().to(precision).requires_grad_() for x in (*own, *prompt)]
        mask = log_mask.detach().requires_grad_()
        out = continuation_attention(*tensors, mask, owners, backend=backend)
        results.append([out.detach(), *torch.autograd.grad(out.double().sin().sum(), [*tensors[:3], mask])])
    for truth, stock, ours in zip(*results, strict=True):
        allowed = max(float((stock - truth).abs().max()), 1e-6)
        assert float((ours - truth).abs().max()) <= 2.5 * allowed


def test_continuations_copy_nothing_of_the_prompt():
    """What is saved for the backward pass: the inputs, the output and a log-sum-exp a row."""
    (*own, log_mask), prompt, _ = continuations(4, 5_000, 1, dtype=torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda x: x):
        out = continuation_attention(*own, *prompt, log_mask)
    given = {x.data_ptr() for x in (*own, *prompt, log_mask)}
    new = [x for x in saved if isinstance(x, torch.Tensor) and x.data_ptr() not in given]
    assert len(saved) >= 8
    assert sum(x.nbytes for x in new) == out.nbytes + 4 * out[..., 0].numel()


def test_continuations_under_autocast_are_computed_as_without():
    (*own, log_mask), prompt, _ = continuations(5, 40, 1, dtype=torch.float32)
    outs, gradients = [], []
    for is_enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_enabled):
            outs.append(continuation_attention(*own, *prompt, log_mask))
            gradients.append(torch.autograd.grad(outs[-1].square().sum(), [*own, log_mask]))
    torch.testing.assert_close(*outs, atol=0, rtol=0)
    torch.testing.assert_close(*gradients, atol=0, rtol=0)

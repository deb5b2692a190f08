"""Methods compared on one prompt: as each alone, answers by greedy decoding, and the queries that a prompt needs."""

import pytest
import torch

from lkv.cache.ragged_cache import RaggedCache
from lkv.evaluation.comparison import MethodComparison, MethodGrid, generate_greedily
from lkv.hf.attention import patch_attention
from lkv.hf.prompt_kv import read_prompt
from lkv.methods.budgets import Uniform
from lkv.methods.method import Method
from lkv.methods.selectors import LearnedScores, SnapKV
from tests.conftest import tiny_llama
from tests.fake_suite import Letters
from tests.requests import resolve_method

TOKENS = 48


def test_a_batch_of_methods_equals_each_alone(model, policy):
    ids = torch.randint(3, 67, (TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()
    patch_attention(model)
    prompt = read_prompt(model, torch.tensor([ids]), queries=True)
    methods = [
        Method("full", Uniform(1.0), LearnedScores(policy)),
        resolve_method("lkv", retention=0.3, policy=policy),
        Method("snap", Uniform(0.3), SnapKV(window=6)),
    ]
    run = MethodComparison(model, ids, prompt, methods)
    continuation = [5, 9, 33, 21, 8, 60]
    fidelity = run.measure_fidelity(continuation, 2)
    answers = run.generate([4, 7, 11], 6)
    log_probs = []
    for method, answer, realised in zip(methods, answers, run.realised_retentions(), strict=True):
        cache = RaggedCache(model, method=method)
        model(torch.tensor([ids]), past_key_values=cache, use_cache=True)
        assert realised == pytest.approx(cache.realised_retention())
        logits = model(torch.tensor([continuation]), past_key_values=cache, use_cache=True).logits[0, 1:-1].detach()
        log_probs.append(torch.log_softmax(logits.float(), -1))
        cache.rewind()
        out = model.generate(torch.tensor([[*ids, 4, 7, 11]]), past_key_values=cache, do_sample=False, max_new_tokens=6)
        assert out[0, TOKENS + 3 :].tolist() == answer
    for own, measured in zip(log_probs, fidelity, strict=True):
        kl = torch.nn.functional.kl_div(own, log_probs[0], reduction="none", log_target=True).sum(-1).mean()
        assert measured.kl == pytest.approx(float(kl), abs=1e-6)
        assert measured.agreement == pytest.approx(float((own.argmax(-1) == log_probs[0].argmax(-1)).float().mean()))
    assert fidelity[0].hidden_error == 0 < fidelity[1].hidden_error
    assert fidelity[0].kl == 0 and fidelity[0].agreement == 1 and fidelity[1].kl > 0


def test_one_line_answers_end_at_a_newline_after_the_first_token_whatever_the_generation_config(model):
    ids = [[7, 30, 12, 44]]
    free = generate_greedily(model, ids, 12)[0]
    assert free == model.generate(torch.tensor(ids), do_sample=False, max_new_tokens=12)[0, 4:].tolist()
    stop = free[4]
    assert generate_greedily(model, ids, 12, [stop])[0] == free[: free.index(stop) + 1]
    # The first token may not end the answer (min_length in LongBench's script).
    late = generate_greedily(model, ids, 12, [free[0]])[0]
    assert late[0] != free[0]
    model.generation_config.update(repetition_penalty=1.8, suppress_tokens=free[:2], no_repeat_ngram_size=1)
    assert model.generate(torch.tensor(ids), do_sample=False, max_new_tokens=12)[0, 4:].tolist() != free
    assert generate_greedily(model, ids, 12) == [free]


def test_rows_that_end_early_do_not_change_the_others(model, policy):
    rows = torch.randint(3, 67, (4, 9), generator=torch.Generator().manual_seed(1)).tolist()
    alone = [generate_greedily(model, [row], 16)[0] for row in rows]
    stop = alone[0][3]
    alone = [generate_greedily(model, [row], 16, [stop])[0] for row in rows]
    assert len({len(answer) for answer in alone}) > 1
    assert generate_greedily(model, rows, 16, [stop]) == alone
    for methods in (4, 3):
        cache = RaggedCache(model, policy=policy, retention=1.0)
        patch_attention(model)
        with torch.no_grad():
            model(torch.tensor(rows[:methods])[:, :-1], past_key_values=cache, use_cache=True)
        assert generate_greedily(model, rows[:methods], 16, [stop], cache, dropping=True) == alone[:methods]


def test_a_grid_requires_queries_only_for_methods_that_read_them(policy):
    model = tiny_llama()
    expected = {"lkv knorm kvzip full": False, "lkv tova": 1, "lkv tova snapkv criticalkv": 64, "lkv snapkv h2o": True}
    for names, queries in expected.items():
        assert MethodGrid(model, Letters(), names.split(), [0.3], policy).required_queries == queries

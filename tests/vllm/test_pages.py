"""The log-sum-exp over vLLM's pages, and reading them, against float64; FlashAttention itself is a stand-in here."""

from itertools import pairwise

import pytest
import torch

from lkv.integrations.vllm.pages import AmxLayout, CPUPages, FlashPages, PageLayout, page_layout
from lkv.integrations.vllm.passes import Batch, Row

HEADS, GROUP, DIM, SIZE, BLOCKS = 2, 3, 32, 32, 12
SCALE = DIM**-0.5


@pytest.fixture
def case():
    """k, v [blocks, H, size, d] in pages, the blocks of four requests, and a pass in which three follow a context."""
    torch.manual_seed(0)
    key, value = torch.randn(2, BLOCKS, HEADS, SIZE, DIM).unbind()
    key[11], value[11] = torch.nan, torch.nan  # a page that nobody may look at
    tables = torch.tensor([[3, 5, 11], [11, 11, 11], [0, 11, 11], [7, 2, 9]], dtype=torch.int32)
    # (place, first and last new token of the pass, tokens in pages); the request in place 1 has no context.
    batch = Batch(HEADS)
    followers = {1: (None, [Row(3, 15, 35, 90), Row(0, 0, 1, 40)]), 2: (None, [Row(2, 14, 15, 7)])}
    batch.add_followers(followers, torch.device("cpu"))
    query = torch.randn(35, HEADS * GROUP, DIM)
    return key, value, tables, batch, query


def oracle(key, tables, batch, query):
    """The log-sum-exp [Hq, n] of each token that follows a context."""
    columns = torch.empty(query.shape[1], len(batch.tokens), dtype=torch.float64)
    for row in batch.rows:
        keys = key[tables[row.index].long()].transpose(0, 1).flatten(1, 2).double()
        for number in range(row.tokens):
            seen = row.length - row.tokens + number + 1
            for head in range(query.shape[1]):
                scores = keys[head // GROUP, :seen] @ query[row.start + number, head].double() * SCALE
                columns[head, row.column + number] = scores.logsumexp(0)
    return columns


def check_read(pages, key, value, table):
    """The first 90 tokens of a request are read as they were written."""
    for found, written in zip(pages.read(table, 90), (key, value), strict=True):
        assert torch.equal(found, written[table.long()].transpose(0, 1).flatten(1, 2)[:, :90])


def test_the_log_sum_exp_of_pages_on_a_cpu(case, monkeypatch):
    key, value, tables, batch, query = case
    cache = torch.cat([key.mT.flatten(2), value.flatten(2)], 2).view(BLOCKS, HEADS, SIZE, 2 * DIM)
    pages = CPUPages(cache, DIM)
    expected = oracle(key, tables, batch, query).float()
    torch.testing.assert_close(pages.log_sum_exp(batch, query, tables, SCALE), expected, atol=1e-5, rtol=1e-5)
    # In blocks of few queries, too.
    monkeypatch.setattr("lkv.integrations.vllm.pages._MAX_SCORES", 1)
    torch.testing.assert_close(pages.log_sum_exp(batch, query, tables, SCALE), expected, atol=1e-5, rtol=1e-5)
    check_read(pages, key, value, tables[3])


def test_what_flash_attention_is_asked(case, monkeypatch):
    """Its arguments describe the tokens that follow contexts; its own kernel has not been run."""
    key, value, tables, batch, query = case

    def flash(q, k, v, cu_seqlens_q, seqused_k, block_table, softmax_scale, causal, max_seqlen_q, max_seqlen_k, **_):
        assert causal and (max_seqlen_q, max_seqlen_k) == (20, 90)
        columns = torch.empty(q.shape[1], len(q))
        for row, (start, stop) in enumerate(pairwise(cu_seqlens_q)):
            length = int(seqused_k[row])
            keys = k[block_table[row].long()].flatten(0, 1)[:length]  # [T, H, d]
            scores = torch.einsum("thd,khd->htk", q[start:stop], keys.repeat_interleave(GROUP, 1)) * softmax_scale
            new = int(stop - start)
            hidden = torch.arange(length) > length - new + torch.arange(new)[:, None]
            columns[:, start:stop] = scores.masked_fill(hidden, -torch.inf).logsumexp(-1)
        return None, columns

    monkeypatch.setattr("vllm.v1.attention.backends.fa_utils.flash_attn_varlen_func", flash, raising=False)
    pages = FlashPages(torch.cat([key, value], -1), DIM, version=2)
    expected = oracle(key, tables, batch, query).float()
    found = pages.log_sum_exp(batch, query, tables, SCALE)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    check_read(pages, key, value, tables[3])


def test_the_layout_of_vllms_own_kernel_is_probed():
    for size, dim in ((32, 64), (128, 128), (32, 80)):
        assert page_layout(torch.float32, size, dim) is PageLayout
        assert page_layout(torch.bfloat16, size, dim) in (PageLayout, AmxLayout)


def test_pages_for_amx(case, monkeypatch):
    """Token t and channel i of k and v where the kernel for AMX stores them."""
    key, value, tables, batch, query = case
    cache = torch.empty(BLOCKS, HEADS, 2, SIZE * DIM)
    for token in range(SIZE):
        for channel in range(DIM):
            place = token // 16 * 16 * DIM + channel // 2 * 32 + token % 16 * 2 + channel % 2
            cache[:, :, 0, place] = key[:, :, token, channel]
            place = channel // 16 * 16 * SIZE + token // 2 * 32 + channel % 16 * 2 + token % 2
            cache[:, :, 1, place] = value[:, :, token, channel]
    monkeypatch.setattr("lkv.integrations.vllm.pages.page_layout", lambda *_: AmxLayout)
    pages = CPUPages(cache.view(BLOCKS, HEADS, SIZE, 2 * DIM), DIM)
    found = pages.log_sum_exp(batch, query, tables, SCALE)
    torch.testing.assert_close(found, oracle(key, tables, batch, query).float(), atol=1e-5, rtol=1e-5)
    check_read(pages, key, value, tables[3])

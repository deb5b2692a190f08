"""A vLLM plugin that serves compressed contexts, without changes to vLLM's files.

    VLLM_PLUGINS=lkv vllm serve MODEL --additional-config '{"lkv": {"store": "contexts"}}'
    llm = vllm.LLM(MODEL, additional_config={"lkv": {...}})

vLLM sees only the question and manages its pages. A context's KV entries are in separate ragged stores. Positions of
the question are shifted by the context's length, and attention over pages and store is merged by log-sum-exp. See
docs/guides/vllm.md.

| file | what it does |
|---|---|
| `adapter.py` | the entry point of the plugin, hooks into the front end, and a list of all hooks |
| `worker.py` | hooks into the worker, and its RPCs |
| `runners.py` | vLLM's two model runners, each with the same `ContextPasses` around its forward pass |
| `contexts.py` | settings; stored contexts of vLLM's model, in each process |
| `skeleton.py` | the transformers model without weights, by which contexts are checked, loaded and scored |
| `requests.py` | checks requests in the front end; prompts for `vllm.LLM` |
| `passes.py` | the forward passes of a worker: requests are opened, passes planned and finished |
| `batch.py` | one forward pass: which tokens follow which context, which texts are compressed |
| `lost_requests.py` | requests whose context became unreadable end with an error, and so do their pages |
| `ranks.py` | ranks of tensor parallelism |
| `attention.py` | attention backends: CPU, CUDA |
| `pages.py` | k and v in vLLM's pages, and the log-sum-exp of attention over them |
| `context_middleware.py`, `answers.py`, `http.py` | `/v1/contexts`, and chats about contexts |
| `command.py` | the command line of `lkv serve --engine vllm` |
"""

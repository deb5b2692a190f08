"""A vLLM plugin that serves compressed contexts, without changes to vLLM's files.

    VLLM_PLUGINS=lkv vllm serve MODEL --additional-config '{"lkv": {"store": "contexts"}}'
    llm = vllm.LLM(MODEL, additional_config={"lkv": {...}})

vLLM sees only the question and manages its pages. A context's KV entries are in separate ragged stores. Positions of
the question are shifted by the context's length, and attention over pages and store is merged by log-sum-exp. See
docs/guides/vllm.md.

| file | what it does |
|---|---|
| `adapter.py` | the entry point of the plugin, a list of all hooks, those into the front end and the scheduler |
| `worker.py` | hooks into the worker: both of vLLM's model runners, RPCs |
| `passes.py` | a worker's forward passes: which tokens follow which context, which texts are compressed |
| `attention.py`, `pages.py` | attention backends; k and v in vLLM's pages, and the log-sum-exp of attention over them |
| `contexts.py` | settings; stored contexts of vLLM's model, in each process |
| `skeleton.py` | the transformers model without weights, by which contexts are checked, loaded and scored |
| `requests.py` | checks requests in the front end; prompts for `vllm.LLM` |
| `server.py`, `http.py` | contexts of the server, metrics; `/v1/contexts`, and chats about contexts |
| `command.py` | the command line of `lkv serve --engine vllm` |
"""

"""Requests whose context became unreadable after they were checked: they end with an error, and so do their pages.

Such a request was computed without its context, in pages that vLLM's prefix cache holds under its context's salt. The
worker names it in its output. The scheduler then takes these pages out of the prefix cache, together with the requests
that have found them there meanwhile, before it schedules any other request.
"""

from typing import Any

_LOST = "lkv_lost_requests"  # attribute of ModelRunnerOutput


def report_lost_requests(output: Any, lost: dict[str, int]) -> Any:
    """Name lost requests in a worker's output, and return it.

    Args:
        output: The output of a pass, or one that is fetched later.
        lost: Each request's first tokens in pages that are right.
    """
    from vllm.v1.outputs import AsyncModelRunnerOutput

    if not isinstance(output, AsyncModelRunnerOutput):
        setattr(output, _LOST, lost)
        return output
    fetch = output.get_output
    output.get_output = lambda: report_lost_requests(fetch(), lost)
    return output


def fail_lost_requests(scheduler: Any, scheduled: Any, output: Any) -> None:
    """Have the scheduler end lost requests with an error, and forget their pages.

    Args:
        scheduler: vLLM's scheduler, before it takes the output.
        scheduled: What it scheduled for that pass.
        output: The output of the pass.
    """
    lost: dict[str, int] = getattr(output, _LOST, None) or {}
    if not lost:
        return
    manager, size = scheduler.kv_cache_manager, scheduler.block_size
    blocks = {name: list(manager.get_block_ids(name)[0]) for name in scheduler.requests}
    wrong = {block for name, right in lost.items() for block in blocks.get(name, ())[right // size :]}
    # Also those of requests that were aborted or preempted during the pass.
    for request in scheduled.scheduled_new_reqs:
        if request.req_id in lost:
            wrong.update(request.block_ids[0][lost[request.req_id] // size :])
    cached = scheduled.scheduled_cached_reqs
    for name, new_blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
        if name in lost and new_blocks is not None:
            wrong.update(new_blocks[0])
    failed = lost.keys() & blocks.keys()
    while found := {name for name in blocks.keys() - failed if not wrong.isdisjoint(blocks[name])}:
        failed |= found
        for name in found:
            first = next(place for place, block in enumerate(blocks[name]) if block in wrong)
            wrong.update(blocks[name][first:])
    manager.evict_blocks(wrong)
    for name in failed & output.req_id_to_index.keys():
        if output.sampled_token_ids:
            output.sampled_token_ids[output.req_id_to_index[name]] = []
        output.prompt_logprobs_dict.pop(name, None)
        output.prompt_token_id_logprobs_dict.pop(name, None)
    # vLLM ends these with FINISHED_ERROR as soon as it has taken the output.
    scheduler.encoder_cache_mismatch_reqs |= failed

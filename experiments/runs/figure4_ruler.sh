#!/usr/bin/env bash
# Fig. 4 (llama) and App. E (qwen): RULER from 4k to 32k tokens at R = 0.15, and at 16k over the retention; if one of the
# two fails, the other is made all the same.
source "$(dirname "$0")/common.sh"
read -r -a lengths <<<"${LENGTHS:-4096 8192 16384 32768}"
status=0
{
    evaluate ruler lengths --methods "${baselines[@]}" --lengths "${lengths[@]}" --retention 0.15 &&
        report figure4a lengths ruler
} || status=1
{
    evaluate ruler retentions --methods "${baselines[@]}" --lengths "${LENGTH:-16384}" \
        --retention 0.5 0.4 0.3 0.2 0.15 0.1 --rows-at-once 8 && report figure4b retentions ruler
} || status=1
exit "$status"

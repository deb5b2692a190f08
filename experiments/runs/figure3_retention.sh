#!/usr/bin/env bash
# Fig. 3 and its tables in App. E: LongBench averages over the retention.
source "$(dirname "$0")/common.sh"
evaluate longbench retention --methods "${baselines[@]}" --retention 0.5 0.4 0.3 0.2 0.15 0.1 \
    --rows-at-once 8
report figure3 retention sweep --published "$short"

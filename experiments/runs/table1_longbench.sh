#!/usr/bin/env bash
# Table 1 and the 16-task breakdowns of App. E: LongBench at R = 0.15.
source "$(dirname "$0")/common.sh"
evaluate longbench longbench --methods "${baselines[@]}" --retention 0.15
report table1 longbench main --published "$short"
report breakdown longbench tasks --published "$short"

#!/usr/bin/env bash
# Everything, from nothing to the paper's tables and figures of one model; run it again to continue after an interruption.
source "$(dirname "$0")/common.sh"
for step in data train table1_longbench table2_ablation figure1_policies figure3_retention figure4_ruler table3_prefill; do
    echo "== $step" >&2
    bash "runs/$step.sh" "$1"
done

#!/usr/bin/env bash
# Everything, from nothing to the paper's tables and figures of one model; run it again to continue after an interruption.
# The preflight, the data and the training must succeed; a table that fails keeps no other from being made.
source "$(dirname "$0")/common.sh"
failed=()
for step in preflight data train table1_longbench table2_ablation figure1_policies figure3_retention figure4_ruler table3_prefill; do
    echo "== $step" >&2
    if bash "experiments/runs/$step.sh" "$1"; then continue; fi
    if [[ $step == preflight || $step == data || $step == train ]]; then exit 1; fi
    failed+=("$step")
done
if [[ ${#failed[@]} -gt 0 ]]; then
    echo "failed: ${failed[*]}; run the same command again to make what is missing" >&2
    exit 1
fi

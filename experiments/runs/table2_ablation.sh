#!/usr/bin/env bash
# Table 2: three budget rules by three selectors on LongBench at R = 0.15.
source "$(dirname "$0")/common.sh"
evaluate longbench ablation --methods "${grid[@]}" --retention 0.15
report table2 ablation ablation --published "$short"

#!/usr/bin/env bash
# The policy, by the paper's schedule (App. C.3), from the data of data.sh.
source "$(dirname "$0")/common.sh"
"${train[@]}" train --preset paper --model "$model" --data "$out/data" --out "$out/training" \
    ${train_options[@]+"${train_options[@]}"}

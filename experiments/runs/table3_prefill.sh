#!/usr/bin/env bash
# Table 3 and Fig. 5: prefill times at 200k tokens, memory over the context length, at R = 0.15; one GPU with 80 GB.
# Uses random weights of the model's shape: no download.
source "$(dirname "$0")/common.sh"
if [[ ! -f $out/profile.json ]]; then # it is written at its end
    "$python" -m experiments.profile --config "$short" --methods full snapkv duo-kvpress adakv-snapkv lkv --retention 0.15 \
        --tokens 25600 51200 102400 204800 \
        --until-out-of-memory ${profile_options[@]+"${profile_options[@]}"} --out "$out/profile.json"
fi
published=() # the paper prints these numbers for Llama only
if [[ $1 == llama ]]; then published=(--published "$short"); fi
"$python" -m experiments.report --profile "$out/profile.json" ${published[@]+"${published[@]}"} --weights --format markdown \
    --out "$out/table3.md" --figure "$out/figure5.pdf"

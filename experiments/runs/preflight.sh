#!/usr/bin/env bash
# Before anything is paid for: is all that the other scripts need there, and does each kind of step run on the real model?
# Names every missing input at once; then trains two steps on TEXT and measures one sample of each table. Once passed, it
# checks the inputs alone.
source "$(dirname "$0")/common.sh"
given=()
for name in TEXT PATTERN RULER LONGBENCH DATA POLICY; do
    if [[ -n ${!name:-} ]]; then given+=("--$(tr A-Z a-z <<<"$name")" "${!name}"); fi
done
processes=$(sed -n 's/.*--num_processes[ =]*\([0-9]*\).*/\1/p' <<<"${LAUNCH:-}")
read -r -a lengths <<<"${LENGTHS:-32768}"
"$python" -m experiments.runs.preflight --model "$model" --out "$out" ${given[@]+"${given[@]}"} \
    --launch "$python" "${launch[0]}" "${train[0]}" --tokens "${lengths[-1]}" \
    --processes "${processes:-1}"
if [[ -f $out/preflight/passed ]]; then exit 0; fi
mkdir -p "$out/preflight/texts"
cp "$TEXT" "$out/preflight/texts/text.txt"
"${train[@]}" train --preset paper --model "$model" --data "$out/preflight/texts" --out "$out/preflight/training" \
    --min-tokens 15000 ${train_options[@]+"${train_options[@]}"} --steps 2 --batch 8 --warmup 1 --validation-samples 1 \
    --checkpoint-every 1 --evaluate-every 2
policy="$out/preflight/training/policy"
evaluate longbench preflight/longbench --methods "${baselines[@]}" --retention 0.15 --samples 1 --tasks narrativeqa
evaluate longbench preflight/ablation --methods "${grid[@]}" --retention 0.15 --samples 1 --tasks narrativeqa
evaluate ruler preflight/ruler --methods "${baselines[@]}" --retention 0.5 0.15 --samples 1 --tasks niah_single_2 \
    --lengths "${lengths[-1]}"
OUT="$out/preflight" POLICY="$policy" bash experiments/runs/figure1_policies.sh "$1"
"$python" -m experiments.profile --config "$short" --methods full snapkv duo-kvpress adakv-snapkv lkv --retention 0.15 \
    ${profile_options[@]+"${profile_options[@]}"} --tokens 1024 --repeats 1 --out "$out/preflight/profile.json"
date >"$out/preflight/passed"

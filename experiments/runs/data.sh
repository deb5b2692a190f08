#!/usr/bin/env bash
# The training data of App. C.2 (recipe loom), counted with the model's tokenizer, without items that
# overlap with LongBench's files where LONGBENCH is set.
source "$(dirname "$0")/common.sh"
local_data=() against=()
if [[ -n ${DATA:-} ]]; then local_data=(--data "$DATA"); fi
if [[ -n ${LONGBENCH:-} ]]; then against=(--against "$LONGBENCH"/*.jsonl* "$LONGBENCH"/*.zip); fi
for i in "${!against[@]}"; do # a pattern that matches no file stays as it is
    if [[ ${against[i]} != --against && ! -f ${against[i]} ]]; then unset "against[$i]"; fi
done
if [[ ${#against[@]} == 1 ]]; then against=(); fi
"$python" -m experiments.data build --recipe loom --model "$model" ${local_data[@]+"${local_data[@]}"} \
    ${against[@]+"${against[@]}"} ${data_options[@]+"${data_options[@]}"} --out "$out/data"

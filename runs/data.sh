#!/usr/bin/env bash
# The training data of App. C.2 (recipe loom), counted with the model's tokenizer, without what LongBench's files hold
# where LONGBENCH gives them.
source "$(dirname "$0")/common.sh"
local_data=() against=()
if [[ -n ${DATA:-} ]]; then local_data=(--data "$DATA"); fi
if [[ -n ${LONGBENCH:-} ]]; then against=(--against "$LONGBENCH"/*.jsonl* "$LONGBENCH"/*.zip); fi
for i in "${!against[@]}"; do # a pattern without a file stands for itself
    if [[ ${against[i]} != --against && ! -f ${against[i]} ]]; then unset "against[$i]"; fi
done
if [[ ${#against[@]} == 1 ]]; then against=(); fi
"$python" -m lkv data build --recipe loom --model "$model" ${local_data[@]+"${local_data[@]}"} \
    ${against[@]+"${against[@]}"} ${data_options[@]+"${data_options[@]}"} --out "$out/data"

#!/usr/bin/env bash
# Fig. 1: the budget policies of five methods at R = 0.15, on the text file TEXT.
source "$(dirname "$0")/common.sh"
pattern=() # kvpress's DuoAttention, as in the tables
if [[ -n ${PATTERN:-} ]]; then pattern=(--pattern "$PATTERN" --pattern-by kvpress); fi
"$python" -m experiments.runs.budget_policies --model "$model" --policy "$policy" --text "${TEXT:?a long text file}" \
    --methods "${baselines[@]}" ${pattern[@]+"${pattern[@]}"} --tokens "${LENGTH:-16384}" --retention 0.15 --out "$out"

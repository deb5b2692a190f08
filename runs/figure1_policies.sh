#!/usr/bin/env bash
# Fig. 1: the budget policies of five methods at R = 0.15, on the text file TEXT.
source "$(dirname "$0")/common.sh"
pattern=() # any other file is a text to estimate on, and TEXT serves as well
if [[ ${PATTERN:-} == *.tsv ]]; then pattern=(--pattern "$PATTERN"); fi
"$python" -m runs.budget_policies --model "$model" --policy "$policy" --text "${TEXT:?a long text file}" \
    ${pattern[@]+"${pattern[@]}"} --tokens "${LENGTH:-16384}" --retention 0.15 --out "$out"

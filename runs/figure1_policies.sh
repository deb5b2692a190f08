#!/usr/bin/env bash
# Fig. 1: the budget policies of five methods at R = 0.15, on the text file TEXT.
source "$(dirname "$0")/common.sh"
"$python" -m runs.budget_policies --model "$model" --policy "${POLICY:?}" --text "${TEXT:?a long text file}" \
    ${PATTERN:+--pattern "$PATTERN"} --tokens 16384 --retention 0.15 --out "$out"

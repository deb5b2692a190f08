# What the scripts for the paper's models share. Each takes the model, llama or qwen, and reads from the environment:
#   POLICY     folder or hub id of the model's policy
#   PATTERN    for DuoAttention: its official full_attention_heads.tsv (llama), or a long text file to estimate on (qwen)
#   RULER      folder with RULER's sources: PaulGrahamEssays.json or a folder essays; SQuAD and HotpotQA (else: from the hub)
#   LONGBENCH  folder with LongBench's files      (default: from the hub)
#   PYTHON     the interpreter                    (default: python of the active environment; after `make`: .venv/bin/python)
#   LAUNCH     how to start measurements          (default: $PYTHON -m lkv; for several GPUs: accelerate launch -m lkv)
#   OUT        where results, tables and figures go (default: runs-local/MODEL in this repository)
# One GPU with 80 GB for each process holds the weights (16 GB) and prompts of about 40k tokens with the methods beside
# each other; where more is needed, fewer are held at a time. Interrupted runs go on where they were.
set -euo pipefail
# Paths are those of the caller's folder.
for name in POLICY PATTERN TEXT RULER LONGBENCH OUT; do
    if [[ -e ${!name:-} ]]; then printf -v "$name" %s "$(realpath "${!name}")"; fi
done
if [[ -n ${OUT:-} && $OUT != /* ]]; then OUT="$PWD/$OUT"; fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case "${1:-}" in
llama) model=meta-llama/Llama-3.1-8B-Instruct short=llama-3.1-8b ;;
qwen) model=Qwen/Qwen3-8B short=qwen3-8b ;;
*)
    echo "usage: $0 llama|qwen" >&2
    exit 2
    ;;
esac
out="${OUT:-runs-local/$1}"
python="${PYTHON:-python}"
read -r -a launch <<<"${LAUNCH:-$python -m lkv}"
rivals=(snapkv pyramidkv duo adakv-snapkv lkv)
grid=(uniform+snapkv ada+snapkv lkv-h+snapkv uniform+expected ada+expected lkv-h+expected uniform+lkv-t ada+lkv-t lkv-h+lkv-t)

# evaluate SUITE FILE ARGUMENTS...
evaluate() {
    local data=() pattern=()
    if [[ $1 == longbench && -n ${LONGBENCH:-} ]]; then data=(--data "$LONGBENCH"); fi
    if [[ $1 == ruler && -n ${RULER:-} ]]; then data=(--data "$RULER"); fi
    if [[ -n ${PATTERN:-} && " $* " == *" duo "* ]]; then pattern=(--pattern "$PATTERN"); fi
    # Before version 4.4, bash takes an empty array for an unset one.
    "${launch[@]}" eval "$1" ${data[@]+"${data[@]}"} ${pattern[@]+"${pattern[@]}"} --model "$model" --dtype bfloat16 \
        --policy "${POLICY:?the folder or hub id of the policy}" --protocol kvpress --out "$out/$2.jsonl" "${@:3}"
}

# report NAME FILE TABLE ARGUMENTS...
report() {
    local shown=("$out/$2.jsonl" --table "$3" "${@:4}")
    "$python" -m lkv report "${shown[@]}" --format markdown --out "$out/$1.md" --figure "$out/$1.pdf"
    "$python" -m lkv report "${shown[@]}" --format latex --out "$out/$1.tex"
    "$python" -m lkv report "${shown[@]}" --format csv --out "$out/$1.csv"
}

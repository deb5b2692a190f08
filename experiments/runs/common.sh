# Shared by the scripts for the paper's models. Each takes the model, llama or qwen, and reads these variables:
#   POLICY     folder or hub id of the model's policy   (default: what train.sh left in OUT/training/policy)
#   TEXT       a long text file, for the preflight and Fig. 1
#   PATTERN    for DuoAttention: its official full_attention_heads.tsv (llama), or a long text file to estimate on (qwen)
#   RULER      folder with RULER's sources: PaulGrahamEssays.json or a folder essays; SQuAD and HotpotQA (else: from the hub)
#   LONGBENCH  folder with LongBench's files      (default: from the hub)
#   DATA       folder with the training sets under their official names      (default, and for what it lacks: the hub)
#   MODEL      the model's folder or hub id       (default: the paper's)
#   PYTHON     the interpreter                    (default: python of the active environment; after `make`: .venv/bin/python)
#   LAUNCH     how to start measurements          (default: $PYTHON -m lkv; for several GPUs: accelerate launch -m lkv)
#   TRAIN      how to start the training          (default: accelerate launch -m lkv)
#   OUT        where results, tables and figures go (default: runs-local/MODEL in this repository)
# DATA_OPTIONS, TRAIN_OPTIONS, EVAL_OPTIONS and PROFILE_OPTIONS add options, which override the scripts' own; LENGTHS and
# LENGTH are RULER's. The rehearsal (experiments/runs/rehearse.py) uses them to make everything small.
# One GPU with 80 GB per process holds the weights (16 GB) and prompts of about 40k tokens with all methods at once; longer
# prompts are measured with fewer methods at a time. Run an interrupted script again to continue it.
set -euo pipefail
# Paths are relative to the caller's folder.
for name in POLICY PATTERN TEXT RULER LONGBENCH DATA MODEL OUT; do
    if [[ -e ${!name:-} ]]; then printf -v "$name" %s "$(realpath "${!name}")"; fi
done
if [[ -n ${OUT:-} && $OUT != /* ]]; then OUT="$PWD/$OUT"; fi
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
case "${1:-}" in
llama) paper=meta-llama/Llama-3.1-8B-Instruct short=llama-3.1-8b ;;
qwen) paper=Qwen/Qwen3-8B short=qwen3-8b ;;
*)
    echo "usage: $0 llama|qwen" >&2
    exit 2
    ;;
esac
model="${MODEL:-$paper}"
out="${OUT:-runs-local/$1}"
policy="${POLICY:-$out/training/policy}"
python="${PYTHON:-python}"
read -r -a launch <<<"${LAUNCH:-$python -m lkv}"
read -r -a train <<<"${TRAIN:-accelerate launch -m lkv}"
read -r -a data_options <<<"${DATA_OPTIONS:-}"
read -r -a train_options <<<"${TRAIN_OPTIONS:-}"
read -r -a eval_options <<<"${EVAL_OPTIONS:-}"
read -r -a profile_options <<<"${PROFILE_OPTIONS:-}"
# PyramidKV and DuoAttention of kvpress: the paper measured those.
baselines=(snapkv pyramidkv-kvpress duo-kvpress adakv-snapkv lkv)
grid=(uniform+snapkv ada+snapkv lkv-h+snapkv uniform+expected ada+expected lkv-h+expected uniform+lkv-t ada+lkv-t lkv-h+lkv-t)

# evaluate SUITE FILE ARGUMENTS...
evaluate() {
    local data=() pattern=()
    if [[ $1 == longbench && -n ${LONGBENCH:-} ]]; then data=(--data "$LONGBENCH"); fi
    if [[ $1 == ruler && -n ${RULER:-} ]]; then data=(--data "$RULER"); fi
    if [[ -n ${PATTERN:-} && " $* " == *" duo"* ]]; then
        pattern=(--pattern "$PATTERN")
        if [[ $PATTERN != *.tsv ]]; then pattern+=(--pattern-by kvpress); fi
    fi
    # Bash before version 4.4 treats an empty array as unset.
    "${launch[@]}" eval "$1" ${data[@]+"${data[@]}"} ${pattern[@]+"${pattern[@]}"} --model "$model" --dtype bfloat16 \
        --policy "$policy" --protocol kvpress --out "$out/$2.jsonl" "${@:3}" ${eval_options[@]+"${eval_options[@]}"}
}

# report NAME FILE TABLE ARGUMENTS...
report() {
    local shown=("$out/$2.jsonl" --table "$3" "${@:4}")
    "$python" -m experiments.report "${shown[@]}" --format markdown --out "$out/$1.md" --figure "$out/$1.pdf" &&
        "$python" -m experiments.report "${shown[@]}" --format latex --out "$out/$1.tex" &&
        "$python" -m experiments.report "${shown[@]}" --format csv --out "$out/$1.csv"
}

#!/usr/bin/env bash
# Predicted and measured peaks of anonymous memory against the limit, as a table in Markdown: every command on a model of 1024 columns
# and 4 layers in bf16, at a generous limit and at the least that works, with 1 and 2 threads. By hand: it needs python3, Linux and 3 GB
# of disk in FOLDER.
#
#   benches/memory_table.sh FOLDER [NAME...]      rows whose name begins with a NAME; all without one
#
# A row of `rows` is a name, and the command after the program, without limit and threads. $model is the dense model, $pruned its pruned one,
# $other a second dense one, $text a text, $out a folder for the result. The least that works is the number of a refusal at 1 MiB.
# Needs Llama 2's tokenizer and a text in $PRUNE_SHARED (default ../shared). PRUNE names a binary that is built already.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(realpath -m "${1:?"usage: benches/memory_table.sh FOLDER [NAME...]"}")
shift
shared=$(realpath "${PRUNE_SHARED:-../shared}")
prune=${PRUNE:-}
if [ -z "$prune" ]; then
  cargo build --release --features synthetic --quiet
  prune=target/release/prune
fi
mkdir -p "$folder"
model=$folder/dense other=$folder/other pruned=$folder/pruned/model out=$folder/out
text=wikitext2:$shared/data/stories/stories.train.txt

make() { # checkpoint, seed
  [ -d "$1" ] || "$prune" make-checkpoint "$1" --hidden-size 1024 --intermediate-size 2816 --num-attention-heads 16 \
    --num-key-value-heads 8 --num-hidden-layers 4 --vocab-size 32000 --max-position-embeddings 4096 --seed "$2" \
    --tokenizer "$shared/data/tokenizers/llama2" --dtype bf16 2> /dev/null
}
make "$model" 0
make "$other" 1
[ -d "$pruned" ] || "$prune" --model "$model" --prune-method magnitude --sparsity-ratio 0.5 --eval none --save "$folder/pruned" \
  > /dev/null 2>&1

train="recover --model $pruned --dataset $text --seqlen 256 --batch-size 2 --optim paged-adamw8bit --eval none --save $out"
rows=(
  "prune wanda|--model $model --sparsity-ratio 0.5 --nsamples 8 --seqlen 512 --dataset $text --eval none --save $out"
  "prune sparsegpt|--model $model --prune-method sparsegpt --sparsity-ratio 0.5 --nsamples 8 --seqlen 512 --dataset $text --eval none --save $out"
  "eval|eval --model $model --seqlen 512 --eval-windows 4 --eval-dataset $text --save $out"
  "generate|generate --model $model --prompt Once --max-tokens 16 --json"
  "recover blocks|$train --how blocks --teacher $model --nsamples 8 --steps 2"
  "recover lora|$train --how lora --nsamples 8 --steps 2 --held-out 2"
  "recover full|$train --how full --nsamples 8 --steps 2 --held-out 2"
  "merge|merge --base $model --model $other --method ties --density 0.5 --save $out"
  "merge with saliency|merge --base $model --model $other --method ties --density 0.5 --saliency base --dataset $text --nsamples 8 --seqlen 512 --save $out"
  "quantize|quantize --to nf4-double --model $model --save $out --json"
)

run() { # name, command, threads, limit in MiB
  rm -rf "$out"
  # shellcheck disable=SC2086 # the command is a list of words
  if ! "$prune" $2 --threads "$3" --max-memory "cpu=$4MiB" > "$folder/out.txt" 2> "$folder/out.log"; then
    echo "| $1 | $3 | $4 | failed: $(grep -m1 '^error' "$folder/out.log") | | | NO |"
    return
  fi
  # Commands without a run folder print their record.
  local record=$out/run.json
  [ -f "$record" ] || record=$folder/out.txt
  python3 - "$1" "$3" "$4" "$record" <<'PYTHON'
import json, sys
name, threads, limit, path = sys.argv[1:]
run = json.load(open(path))
devices = run.get("plan", {}).get("devices", [])
cpu = next((device for device in devices if device["device"] == "cpu"), {"peak": run.get("predicted"), "peak_phase": "generate"})
predicted, measured = cpu["peak"] / 2**20, run["peak_anonymous"] / 2**20
phase = max(run.get("phases", [{"peak_anonymous": 0, "phase": "generate"}]), key=lambda phase: phase["peak_anonymous"] or 0)["phase"]
ratio = measured / predicted
is_near = 0.9 <= ratio <= 1.1 if measured > 64 else abs(measured - predicted) <= 8
is_below = measured <= int(limit)
print(f"| {name} | {threads} | {limit} | {predicted:.0f} ({cpu['peak_phase']}) | {measured:.0f} ({phase}) | {ratio:.2f} "
      f"| {'yes' if is_near and is_below else 'NO'} |", flush=True)
PYTHON
}

least() { # command, threads
  rm -rf "$out"
  # shellcheck disable=SC2086
  "$prune" $1 --threads "$2" --max-memory cpu=1MiB 2>&1 > /dev/null | sed -n 's/^hint:.*--max-memory cpu=\([0-9]*\)MiB.*/\1/p' || true
}

echo "| run | threads | limit MiB | predicted MiB (in) | measured MiB (in) | measured / predicted | as planned, and below the limit |"
echo "| --- | --- | --- | --- | --- | --- | --- |"
for row in "${rows[@]}"; do
  name=${row%%|*} line=${row#*|}
  wanted=$([ $# -eq 0 ] && echo yes || for prefix in "$@"; do [[ $name == "$prefix"* ]] && echo yes; done || true)
  [ -n "$wanted" ] || continue
  for threads in 1 2; do
    tight=$(least "$line" "$threads")
    for limit in 2048 "${tight:-0}"; do
      run "$name" "$line" "$threads" "$limit"
    done
  done
done
rm -rf "$out"

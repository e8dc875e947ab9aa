#!/usr/bin/env bash
# The same Wanda job by prune and by PyTorch with transformers, alternately, on checkpoints of real shapes: medians of wall time and
# peaks of memory, as a table in Markdown. By hand: it needs Linux, 20 GB of disk in FOLDER and a Python with torch, transformers and
# safetensors, and takes about an hour on two cores.
#
#   PYTHON=…/bin/python benches/against_pytorch.sh FOLDER [SHAPE…]        (tinyllama 7b)
#
# PyTorch's side is $PRUNE_SHARED/tools/torch_baseline.py with scaled_dot_product_attention, of which only what prunes counts (embed,
# capture, prune, propagate): neither loading nor saving. Ours counts all but start-up (reading texts): reading layers, pruning,
# writing and verifying included. LAYERS="2 4", ROUNDS=3, THREADS=2, EVAL=0 windows of perplexity on both sides; PRUNE names a binary that is
# built already.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:?"usage: benches/against_pytorch.sh FOLDER [SHAPE…]"}
shift
shapes=("$@")
[ $# -gt 0 ] || shapes=(tinyllama 7b)
shared=${PRUNE_SHARED:-../shared}
python=${PYTHON:-python3}
threads=${THREADS:-2}
windows=${EVAL:-0}
prune=${PRUNE:-}
if [ -z "$prune" ]; then
  cargo build --release --features synthetic --quiet
  prune=target/release/prune
fi
mkdir -p "$folder"

make() { # shape, layers, dtype
  local to=$folder/$1-$2-$3
  [ -d "$to" ] && return
  case $1 in
    tinyllama) flags=(--hidden-size 2048 --intermediate-size 5632 --num-attention-heads 32 --num-key-value-heads 4 --head-dim 64) ;;
    7b) flags=(--hidden-size 4096 --intermediate-size 11008 --num-attention-heads 32) ;;
  esac
  "$prune" make-checkpoint "$to" "${flags[@]}" --vocab-size 32000 --max-position-embeddings 4096 --num-hidden-layers "$2" \
    --tokenizer "$shared/data/tokenizers/llama2" --dtype "$3" 2> /dev/null
}

ours() { # checkpoint, dtype
  local eval=(--eval none)
  [ "$windows" = 0 ] || eval=(--eval pruned --eval-windows "$windows")
  "$prune" --model "$1" --sparsity-ratio 0.5 --nsamples 8 --seqlen 2048 --dataset "wikitext2:$shared/data/wikitext2" \
    --eval-dataset "wikitext2:$shared/data/wikitext2" --dtype "$2" --threads "$threads" --use-cpu "${eval[@]}" --save "$folder/run" --force > /dev/null 2>&1
  cat "$folder/run/run.json"
  echo
  rm -rf "$folder/run/model"
}

theirs() { # checkpoint, dtype
  local eval=()
  [ "$windows" = 0 ] || eval=(--eval-windows "$windows")
  "$python" "$shared/tools/torch_baseline.py" --model "$1" --dtype "$2" --attn sdpa --nsamples 8 --seqlen 2048 --threads "$threads" "${eval[@]}" 2> /dev/null
}

echo "| checkpoint | prune | seconds | PyTorch, sdpa | seconds | ratio of each round | median | peak anonymous | peak resident | ratio |"
echo "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
for shape in "${shapes[@]}"; do
  for layers in ${LAYERS:-2 4}; do
    for pair in ${PAIRS:-bf16:auto:bfloat16 bf16:auto:float32 f16:auto:float32}; do
      IFS=: read -r stored mine other <<< "$pair"
      make "$shape" "$layers" "$stored"
      checkpoint=$folder/$shape-$layers-$stored
      : > "$folder/ours.jsonl"
      : > "$folder/theirs.jsonl"
      for _ in $(seq "${ROUNDS:-3}"); do
        ours "$checkpoint" "$mine" | python3 -c 'import json, sys; print(json.dumps(json.load(sys.stdin)))' >> "$folder/ours.jsonl"
        theirs "$checkpoint" "$other" | tail -1 >> "$folder/theirs.jsonl"
      done
      python3 - "$shape, $layers layers, $stored" "$other" "$folder" << 'PYTHON'
import json, statistics, sys
name, other, folder = sys.argv[1:]
ours = [json.loads(line) for line in open(folder + "/ours.jsonl")]
theirs = [json.loads(line) for line in open(folder + "/theirs.jsonl")]
def mine(run):
    return sum(phase["seconds"] for phase in run["phases"] if phase["phase"] != "tokenize")
def its(run):
    return sum(run[phase] for phase in ("embed", "capture", "prune", "propagate", "evaluate") if phase in run)
a, b = [mine(run) for run in ours], [its(run) for run in theirs]
ratios = [x / y for x, y in zip(a, b)]
ram, rss = max(run["peak_anonymous"] for run in ours) / 2**30, max(run["peak_rss_gib"] for run in theirs)
median = statistics.median
print(f"| {name} | {ours[0]['arithmetic']['dtype']} | {median(a):.1f} | {other} | {median(b):.1f} | {', '.join(f'{r:.2f}' for r in ratios)} | {median(ratios):.2f} "
      f"| {ram:.2f} GiB | {rss:.2f} GiB | {ram / rss:.2f} |", flush=True)
PYTHON
    done
  done
done

#!/usr/bin/env bash
# Peak anonymous memory against depth and size, as a table in Markdown. By hand: it needs python3, Linux and 30 GB of disk in
# FOLDER. The first three runs take minutes; the last one evaluates all 166 windows of the test text twice, which takes more
# than an hour on two cores: WINDOWS evaluates that many instead, 0 leaves the run out.
#
#   benches/memory.sh FOLDER [WINDOWS]
#
# Needs Llama 2's tokenizer and wiki.test.raw in $PRUNE_SHARED (default ../shared).
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:?"usage: benches/memory.sh FOLDER [WINDOWS]"}
shared=${PRUNE_SHARED:-../shared}
text=wikitext2:$shared/data/wikitext2
seven_b=(--hidden-size 4096 --intermediate-size 11008 --num-attention-heads 32 --vocab-size 32000 --max-position-embeddings 4096
  --tokenizer "$shared/data/tokenizers/llama2" --dtype bf16)

cargo build --release --features synthetic --quiet
prune=target/release/prune
mkdir -p "$folder"

run() { # name, checkpoint, flags of the run
  local name=$1 model=$2
  shift 2
  "$prune" --model "$folder/$model" --sparsity-ratio 0.5 --dataset "$text/wiki.valid.raw" --save "$folder/$name" --force "$@" \
    > "$folder/$name.txt" 2> "$folder/$name.log"
  rm -rf "$folder/$name/model"
  python3 - "$name" "$folder/$name/run.json" <<'PYTHON'
import json, sys
name, path = sys.argv[1:]
run = json.load(open(path))
peak = max(run["phases"], key=lambda phase: phase["peak_anonymous"])
print(f"| {name} | {run['model']['bytes'] / 2**30:.2f} | {run['hidden_states']} | {run['peak_anonymous'] / 2**20:.0f} | {peak['phase']} | {run['seconds']:.0f} |", flush=True)
PYTHON
}

make() { # checkpoint, flags
  [ -d "$folder/$1" ] || "$prune" make-checkpoint "$folder/$1" "${@:2}" 2> /dev/null
}

echo "| run | weights GiB | hidden states | peak anonymous MiB | in phase | seconds |"
echo "| --- | --- | --- | --- | --- | --- |"
for layers in 4 32; do
  make "1k-$layers" --hidden-size 1024 --intermediate-size 2816 --num-attention-heads 16 --num-hidden-layers "$layers" --vocab-size 32000 \
    --tokenizer "$shared/data/tokenizers/llama2" --dtype bf16
  run "depth-$layers" "1k-$layers" --nsamples 8 --seqlen 512 --eval both --eval-dataset "$text/wiki.test.raw" --eval-windows 8
done
make 7b-32 "${seven_b[@]}" --num-hidden-layers 32
run 7b-32-layers 7b-32 --nsamples 2 --seqlen 512 --eval none
windows=${2:-166}
if [ "$windows" -gt 0 ]; then
  make 7b-4 "${seven_b[@]}" --num-hidden-layers 4
  run "7b-4-layers-$windows-windows" 7b-4 --nsamples 2 --eval both --eval-dataset "$text/wiki.test.raw" --eval-windows "$windows" \
    --hidden-states disk --offload-folder "$folder"
fi

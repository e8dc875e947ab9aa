#!/usr/bin/env bash
# Predicted against measured peak of anonymous memory, as a table in Markdown: the demo model, a 1B shape and a 7B shape, with and
# without evaluation, hidden states in RAM and on disk; then the 1B shape, all 16 layers of it, at 60 % of its default peak. By hand:
# it needs python3, Linux and 10 GB of disk in FOLDER, and takes about an hour on two cores.
#
#   benches/predictions.sh FOLDER
#
# In the first rows the shapes have fewer layers than the models they are named after (LAYERS=4, of 16 and 32): peaks do not depend
# on the depth. Needs the tokenizers and wiki.test.raw in $PRUNE_SHARED (default ../shared). PRUNE names a binary that is built already.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:?"usage: benches/predictions.sh FOLDER"}
shared=${PRUNE_SHARED:-../shared}
text=wikitext2:$shared/data/wikitext2
layers=${LAYERS:-4}
prune=${PRUNE:-}
if [ -z "$prune" ]; then
  cargo build --release --features synthetic --quiet
  prune=target/release/prune
fi
mkdir -p "$folder"

make() { # checkpoint, flags
  [ -d "$folder/$1" ] || "$prune" make-checkpoint "$folder/$1" "${@:2}" 2> /dev/null
}

run() { # name, flags of the run
  "$prune" "${@:2}" --sparsity-ratio 0.5 --save "$folder/run" --force --use-cpu > "$folder/run.txt" 2> "$folder/run.log" ||
    { cat "$folder/run.log" >&2; exit 1; }
  python3 - "$1" "$folder/run/run.json" <<'PYTHON'
import json, sys
name, path = sys.argv[1:]
run = json.load(open(path))
plan = run["plan"]
cpu = next(device for device in plan["devices"] if device["device"] == "cpu")
predicted, measured = cpu["peak"], run["peak_anonymous"]
phase = max(run["phases"], key=lambda phase: phase["peak_anonymous"])
apart = predicted - measured
allowed = max(measured / 10, 32 << 20)
print(f"| {name} | {plan['hidden_states']['rest']} | {predicted / 2**20:.0f} | {cpu['peak_phase']} | {measured / 2**20:.0f} | {phase['phase']} "
      f"| {apart / 2**20:+.0f} | {100 * apart / measured:+.1f} % | {'yes' if abs(apart) <= allowed else 'NO'} |", flush=True)
PYTHON
  rm -rf "$folder/run/model"
}

echo "| run | hidden states | predicted MiB | in | measured MiB | in | apart MiB | apart | within the larger of 10 % and 32 MiB |"
echo "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
"$prune" demo --save "$folder/demo" > /dev/null 2>&1 || [ -d "$folder/demo/dense" ]
make_1b() { # checkpoint, layers
  make "$1" --hidden-size 2048 --intermediate-size 8192 --num-attention-heads 32 --num-key-value-heads 8 --head-dim 64 --vocab-size 128256 \
    --max-position-embeddings 8192 --tie-word-embeddings --num-hidden-layers "$2" --tokenizer "$shared/data/tokenizers/llama3" --dtype bf16
}
make_1b 1b "$layers"
make 7b --hidden-size 4096 --intermediate-size 11008 --num-attention-heads 32 --vocab-size 32000 --max-position-embeddings 4096 \
  --num-hidden-layers "$layers" --tokenizer "$shared/data/tokenizers/llama2" --dtype bf16
for rest in ram disk; do
  spill=(--hidden-states "$rest" --offload-folder "$folder")
  run "demo, no evaluation" --model "$folder/demo/dense" --dataset demo --eval none "${spill[@]}"
  run "demo, both sides" --model "$folder/demo/dense" --dataset demo --eval-dataset demo --eval both "${spill[@]}"
  for shape in 1b 7b; do
    model=(--model "$folder/$shape" --dataset "$text/wiki.valid.raw" "${spill[@]}")
    run "$shape, 4 samples of 2048, no evaluation" "${model[@]}" --nsamples 4 --eval none
    run "$shape, 2 samples and 3 windows of 2048, both sides" "${model[@]}" --nsamples 2 --eval both \
      --eval-dataset "$text/wiki.test.raw" --eval-windows 3
  done
done

make_1b 1b-whole 16
model=(--model "$folder/1b-whole" --dataset "$text/wiki.valid.raw" --nsamples 16 --eval-dataset "$text/wiki.test.raw" --eval-windows 2)
run "1b, all 16 layers, 16 samples of 2048 and 2 windows" "${model[@]}"
budget=$(python3 -c "
import json
plan = json.load(open('$folder/run/run.json'))['plan']
print(next(device['peak'] for device in plan['devices'] if device['device'] == 'cpu') * 6 // 10 >> 20)")
run "the same with --max-memory cpu=${budget}MiB" "${model[@]}" --max-memory "cpu=${budget}MiB" --offload-folder "$folder"

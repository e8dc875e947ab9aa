#!/usr/bin/env bash
# The same merges by prune and by mergekit, alternately: wall seconds and peaks of anonymous memory, as a table in Markdown. By
# hand: it needs Linux, three models of one shape, room for two outputs beside them, and a Python with mergekit.
#
#   PYTHON=…/bin/python benches/against_mergekit.sh BASE EXPERT EXPERT
#
# mergekit runs on the CPU with its defaults and as many threads. ROUNDS=3, THREADS=2; PRUNE names a binary that is built already. Anonymous memory
# is sampled every 0.2 s; mapped files do not count. Both sides count everything, start-up, writing and, on our side, the read-back included.
set -euo pipefail
base=$(realpath "${1:?"usage: benches/against_mergekit.sh BASE EXPERT EXPERT"}")
one=$(realpath "$2")
two=$(realpath "$3")
cd "$(dirname "$0")/.."
python=$(realpath -s "${PYTHON:-$(command -v python3)}")
threads=${THREADS:-2}
prune=${PRUNE:-}
if [ -z "$prune" ]; then
  cargo build --release --quiet
  prune=target/release/prune
fi
work=$(mktemp -d "$(dirname "$base")/against-mergekit.XXXXXX")
trap 'rm -rf "$work"' EXIT

recipe() { # method
  case $1 in
    linear) printf 'merge_method: linear\nmodels:\n  - {model: %s, parameters: {weight: 0.4}}\n  - {model: %s, parameters: {weight: 0.3}}\n  - {model: %s, parameters: {weight: 0.3}}\ndtype: bfloat16\n' "$base" "$one" "$two" ;;
    ties) printf 'merge_method: ties\nbase_model: %s\nmodels:\n  - {model: %s, parameters: {weight: 0.6, density: 0.5}}\n  - {model: %s, parameters: {weight: 0.4, density: 0.5}}\ndtype: bfloat16\n' "$base" "$one" "$two" ;;
  esac > "$work/$1.yml"
}

# Runs a command; prints wall seconds and the peak of its anonymous memory in MiB.
measure() {
  rm -rf "$work/out"
  local most=0 now begun ended
  begun=$(date +%s.%N)
  "$@" > "$work/log" 2>&1 &
  local child=$!
  while kill -0 "$child" 2> /dev/null; do
    now=$(awk '/^RssAnon/ { kb += $2 } END { print int(kb / 1024) }' "/proc/$child/status" 2> /dev/null || echo 0)
    [ "${now:-0}" -gt "$most" ] && most=$now
    sleep 0.2
  done
  wait "$child" || { tail -5 "$work/log" >&2; exit 1; }
  ended=$(date +%s.%N)
  awk -v a="$begun" -v b="$ended" -v m="$most" 'BEGIN { printf "%.1f %d\n", b - a, m }'
}

echo "| method | prune, s | mergekit, s | ratio of each round | prune, MiB | mergekit, MiB |"
echo "| --- | --- | --- | --- | --- | --- |"
for method in ${METHODS:-linear ties}; do
  recipe "$method"
  ours=() theirs=() ratios=() our_peak=0 their_peak=0
  for _ in $(seq "${ROUNDS:-3}"); do
    read -r seconds peak < <(measure "$prune" merge "$work/$method.yml" --threads "$threads" --save "$work/out")
    ours+=("$seconds")
    [ "$peak" -gt "$our_peak" ] && our_peak=$peak
    read -r other peak < <(OMP_NUM_THREADS=$threads measure "$python" -m mergekit.scripts.run_yaml "$work/$method.yml" "$work/out" --no-copy-tokenizer)
    theirs+=("$other")
    [ "$peak" -gt "$their_peak" ] && their_peak=$peak
    ratios+=("$(awk -v a="$seconds" -v b="$other" 'BEGIN { printf "%.2f", a / b }')")
  done
  echo "| $method | ${ours[*]} | ${theirs[*]} | ${ratios[*]} | $our_peak | $their_peak |"
done

#!/usr/bin/env bash
# The picture of README.md: perplexity against sparsity of the demo model, for four methods. Takes two minutes.
#
#   benches/picture.sh PRUNE FOLDER          writes FOLDER/report/perplexity.svg
set -euo pipefail
usage="usage: benches/picture.sh PRUNE FOLDER"
prune=$(realpath "${1:?$usage}")
mkdir -p "${2:?$usage}"
cd "$2"
[ -d demo ] || "$prune" demo --save demo > /dev/null
for method in ladder magnitude ria wanda; do
  for ratio in 0.3 0.4 0.5 0.6 0.7; do
    "$prune" --model demo/dense --prune-method "$method" --sparsity-ratio "$ratio" --dataset demo --eval-dataset demo --eval both \
      --no-save-model --save "runs/$method-$ratio" --force --quiet > /dev/null
  done
done
"$prune" report runs/* --out report

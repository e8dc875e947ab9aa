#!/usr/bin/env bash
# Ranks against threads on one machine, and ranks as hosts of a slower network. By hand: needs an MPI, python3 and 2 GB of disk in FOLDER.
#
#   benches/ranks.sh FOLDER [ROUNDS] [LAYERS]
#
# It prints seconds of `wanda` at TinyLlama's shape with 16 samples of 2048 tokens: one process with two threads and two ranks of one thread in
# turn, then four ranks. As root on Linux, with Open MPI and iproute2, two and four ranks follow as hosts in network namespaces, with 1 Gb/s and
# 100 Mb/s. The SHA-256 of the model, the same in all rows, is in the last column. Needs Llama 2's tokenizer and wiki.valid.raw in $PRUNE_SHARED
# (default ../shared). $PRUNE names a binary in place of the one that is built here.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(realpath -m "${1:?"usage: benches/ranks.sh FOLDER [ROUNDS] [LAYERS]"}")
rounds=${2:-5} layers=${3:-6}
shared=$(realpath "${PRUNE_SHARED:-../shared}")
prune=${PRUNE:-}
if [ -z "$prune" ]; then
  cargo build --release --features synthetic,mpi --quiet
  prune=$PWD/target/release/prune
fi
mkdir -p "$folder"
model=$folder/tiny-$layers
[ -d "$model" ] || "$prune" make-checkpoint "$model" --hidden-size 2048 --intermediate-size 5632 --num-attention-heads 32 --num-key-value-heads 4 \
  --num-hidden-layers "$layers" --vocab-size 32000 --tokenizer "$shared/data/tokenizers/llama2" --dtype bf16 2> /dev/null
job=("$prune" --model "$model" --sparsity-ratio 0.5 --dataset "wikitext2:$shared/data/wikitext2/wiki.valid.raw" --nsamples 16 --seqlen 2048
  --eval none --use-cpu --quiet --force --save "$folder/out")
# Open MPI binds two ranks to a core each and refuses root and more ranks than cores; MPICH has none of these flags.
launch=(mpirun -bind-to none)
if mpirun --version 2>&1 | grep -q "Open MPI"; then
  launch=(mpirun --bind-to none --oversubscribe --allow-run-as-root)
fi

row() { # name
  python3 - "$1" "$folder/out" <<'PYTHON'
import hashlib, json, sys
name, out = sys.argv[1:]
run = json.load(open(out + "/run.json"))
digest = hashlib.sha256()
for file in run["output"]["verification"]["files"]:
    digest.update(file["sha256"].encode())
sent = [rank["bytes_sent"] for rank in run.get("ranks") or []]
print(f"| {name} | {run['seconds']:.1f} | {max(sent, default=0)} | {digest.hexdigest()[:12]} |", flush=True)
PYTHON
}

echo "| ranks and threads | seconds | bytes sent, the most of a rank | model |"
echo "| --- | --- | --- | --- |"
for _ in $(seq "$rounds"); do
  "${job[@]}" --threads 2 > /dev/null && row "1 x 2"
  "${launch[@]}" -n 2 "${job[@]}" --threads 1 > /dev/null && row "2 x 1"
done
"${launch[@]}" -n 4 "${job[@]}" --threads 1 > /dev/null && row "4 x 1"

[ "$(id -u)" = 0 ] && command -v ip > /dev/null && command -v tc > /dev/null && [ "${launch[1]}" = --bind-to ] || exit 0
hosts=4
remove() {
  for host in $(seq $hosts); do ip netns del "prune-$host" 2> /dev/null || true; done
  ip link del prune-net 2> /dev/null || true
}
trap remove EXIT
# Open MPI starts its processes on a host through this program, in place of ssh.
agent=$folder/agent
cat > "$agent" << 'AGENT'
#!/bin/sh
namespace=prune-${1##*.}
shift
exec ip netns exec "$namespace" unshare --uts sh -c "hostname $namespace; $*"
AGENT
chmod +x "$agent"
for rate in 1gbit 100mbit; do
  remove
  ip link add prune-net type bridge && ip link set prune-net up
  for host in $(seq $hosts); do
    ip netns add "prune-$host"
    ip link add "prune-v$host" type veth peer name eth0 netns "prune-$host"
    ip link set "prune-v$host" master prune-net up
    ip -n "prune-$host" addr add "10.9.0.$host/24" dev eth0
    ip -n "prune-$host" link set eth0 up && ip -n "prune-$host" link set lo up
    ip netns exec "prune-$host" tc qdisc add dev eth0 root tbf rate $rate burst 2mb latency 200ms
  done
  for ranks in 2 4; do
    "$agent" 10.9.0.1 mpirun --allow-run-as-root --bind-to none --mca plm_rsh_agent "$agent" --mca plm_rsh_no_tree_spawn 1 --mca pml ob1 \
      --mca btl tcp,self --mca btl_tcp_if_include eth0 --mca oob_tcp_if_include eth0 --host "$(seq -f 10.9.0.%g -s , $ranks)" -n $ranks \
      "${job[@]}" --threads 1 > /dev/null
    row "$ranks hosts, $rate"
  done
done

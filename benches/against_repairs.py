#!/usr/bin/env python3
"""One decoder layer pruned by the published SparseGPT and ALPS on the CPU, and by prune: seconds, in one run.

By hand. Needs torch, transformers and safetensors, and checkouts of IST-DASLab/sparsegpt and mazumder-lab/ALPS, whose code is
imported unchanged (device names are replaced as it is read):

    prune make-checkpoint ONE --hidden-size 4096 --intermediate-size 11008 --num-attention-heads 32 --vocab-size 32000 \
        --num-hidden-layers 1 --dtype bf16 --tokenizer TOKENIZER
    benches/against_repairs.py --model ONE --prune target/release/prune --sparsegpt CHECKOUT --alps CHECKOUT --dataset wikitext2:FOLDER

The reference's layer computes in the dtype that is faster here (bf16 by default), its statistics and solvers in f32 and f64 as
written. Its time counts what prunes: the pass with statistics, the solvers, the pass of the pruned layer. ALPS counts its solver
alone, per matrix; --rounds N ends it after N times three iterations. Our solver's time for a matrix is that of `score and mask` in a run
with `--include '*.NAME'`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

NAMES = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]


def published(folder, file):
    """The module in a file of a checkout, on the CPU."""
    sys.path.insert(0, str(folder))
    text = (Path(folder) / file).read_text().replace("cuda:0", "cpu")
    module = types.ModuleType(file)
    exec(compile(text, file, "exec"), module.__dict__)
    return module


class TooLong(Exception):
    """A solver that is ended early."""


def layer_of(model, dtype):
    """The layer, its rotary embedding, the embedding of tokens."""
    config = AutoConfig.from_pretrained(model)
    config._attn_implementation = "sdpa"
    tensors = {}
    for file in sorted(Path(model).glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():
                if "layers.0." in name or "embed_tokens" in name:
                    tensors[name.removeprefix("model.").removeprefix("layers.0.")] = opened.get_tensor(name).to(dtype)
    embedding = tensors.pop("embed_tokens.weight")
    layer = LlamaDecoderLayer(config, 0).to(dtype).eval()
    layer.load_state_dict(tensors)
    return config, layer, LlamaRotaryEmbedding(config), embedding


@torch.no_grad()
def sparsegpt(module, args, dtype):
    """Seconds of the reference's SparseGPT on the layer, by part, and the Gram matrices and weights for ALPS."""
    config, layer, rotary, embedding = layer_of(args.model, dtype)
    torch.manual_seed(0)
    samples = [embedding[torch.randint(0, config.vocab_size, (1, args.seqlen))] for _ in range(args.nsamples)]
    positions = torch.arange(args.seqlen)[None]
    cos_sin = rotary(samples[0], positions)
    run = lambda x: layer(x, position_ids=positions, position_embeddings=cos_sin)
    linears = {name: layer.get_submodule(name) for name in NAMES}
    times = {}
    solvers = {name: module.SparseGPT(linear) for name, linear in linears.items()}
    hooks = [linears[name].register_forward_hook(lambda _, x, y, name=name: solvers[name].add_batch(x[0], y)) for name in NAMES]
    start = time.perf_counter()
    for x in samples:
        run(x)
    times["statistics"] = time.perf_counter() - start
    for hook in hooks:
        hook.remove()
    kept = {name: (linears[name].weight.data.clone(), solvers[name].H.clone() * args.nsamples / 2) for name in args.matrices}
    start = time.perf_counter()
    for name in NAMES:
        solvers[name].fasterprune(args.ratio, percdamp=0.01, blocksize=128)
    times["solver"] = time.perf_counter() - start
    start = time.perf_counter()
    for x in samples:
        run(x)
    times["pass"] = time.perf_counter() - start
    return times, kept


@torch.no_grad()
def alps(module, weight, gram, args):
    """Prints the seconds of the reference's ALPS on one matrix: eigenvectors, each three iterations, all.

    --rounds ends it early. Then its conjugate gradients, whose time depends on no value, run from zero on a random support."""
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data = weight.clone()
    solver = module.ALPS_prune(linear, args.nsamples, args.seqlen)
    solver.XtX = gram.clone()
    start = time.perf_counter()
    passed = lambda: round(time.perf_counter() - start, 1)
    topk, eigh, calls, rounds = torch.topk, torch.linalg.eigh, 0, []

    def counted(*values, **named):
        nonlocal calls
        calls += 1
        # One call before the loop, three in it and one behind them per round of three iterations.
        if calls % 4 == 2:
            rounds.append(passed())
            if args.rounds and len(rounds) > args.rounds:
                raise TooLong
        return topk(*values, **named)

    def timed(matrix):
        before = passed()
        result = eigh(matrix)
        print("  eigenvectors", round(passed() - before, 1), flush=True)
        return result

    torch.topk, torch.linalg.eigh = counted, timed
    try:
        solver.ALPS_admm(args.ratio)
        print("  to its end", passed())
    except TooLong:
        print("  not to its end", passed())
        target = solver.YtX.T
        support = (torch.rand(target.shape) >= args.ratio).float()
        before = passed()
        solver.cg_batch(solver.XtX, target, support, X0=torch.zeros_like(target), rtol=1e-4, maxiter=10)
        print("  conjugate gradients", round(passed() - before, 1))
    finally:
        torch.topk, torch.linalg.eigh = topk, eigh
    print("  rounds of three iterations begin at", rounds)


def ours(args, method, folder):
    """The record of a run of prune."""
    save = Path(folder) / method
    subprocess.run(
        [args.prune, "--model", args.model, "--prune-method", method, "--sparsity-ratio", str(args.ratio), "--nsamples", str(args.nsamples),
         "--seqlen", str(args.seqlen), "--dataset", args.dataset, "--use-cpu", "--threads", str(args.threads), "--eval", "none",
         "--save", str(save), "--force"],
        check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return json.loads((save / "run.json").read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ["model", "prune", "sparsegpt", "alps", "dataset"]:
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--nsamples", type=int, default=8)
    parser.add_argument("--seqlen", type=int, default=2048)
    parser.add_argument("--ratio", type=float, default=0.6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--methods", nargs="*", default=["sparsegpt", "ladder"])
    parser.add_argument("--matrices", nargs="*", default=["self_attn.q_proj", "mlp.down_proj"])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.cuda.synchronize = lambda *_: None
    with tempfile.TemporaryDirectory() as folder:
        records = {method: ours(args, method, folder) for method in args.methods}
    print(json.dumps({m: {k: r[k] for k in r if k in ("profile", "phases", "seconds", "layers")} for m, r in records.items()})[:6000])
    theirs, kept = sparsegpt(published(args.sparsegpt, "sparsegpt.py"), args, getattr(torch, args.dtype))
    print("SparseGPT, reference", {part: round(seconds, 1) for part, seconds in theirs.items()})
    module = published(args.alps, "alps.py")
    for name in args.matrices:
        print("ALPS, reference", name, flush=True)
        alps(module, *kept[name], args)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()

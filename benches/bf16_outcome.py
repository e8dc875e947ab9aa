#!/usr/bin/env python3
"""What bf16 products cost in outcome: real checkpoints, stored as bf16 and as f16, pruned with f32 and with bf16 products by each method.

    python benches/bf16_outcome.py FOLDER [WINDOWS]     (torch, safetensors; $PRUNE_SHARED, default ../shared; PRUNE names the binary)

Prints a Markdown table: perplexities of both, and how many of the pruned weights are the same. Needs a CPU with bf16 products.
"""
import json, os, shutil, subprocess, sys

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

folder, shared = sys.argv[1], os.environ.get("PRUNE_SHARED", "../shared")
prune = os.environ.get("PRUNE", "target/release/prune")
text = f"wikitext2:{shared}/data/wikitext2"
windows = sys.argv[2] if len(sys.argv) > 2 else "40"
MODELS = {"stories260k": ["--seqlen", "512"], "wikitext-llama-8m": []}


def stored_as(dtype, name):
    source, target = f"{shared}/models/{name}", f"{folder}/{name}-{dtype}"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    for file in os.listdir(target):
        if file.endswith(".safetensors"):
            path = f"{target}/{file}"
            tensors = {key: value.to(getattr(torch, dtype)) for key, value in load_file(path).items()}
            os.chmod(path, 0o644)
            save_file(tensors, path, {"format": "pt"})
    path = f"{target}/config.json"
    config = json.load(open(path))
    config["torch_dtype"] = dtype
    os.chmod(path, 0o644)
    json.dump(config, open(path, "w"), indent=2)
    return target


def run(model, flags, method, dtype):
    save = f"{folder}/{dtype}"
    command = [prune, "--model", model, "--prune-method", method, "--sparsity-ratio", "0.5", "--dataset", text, "--eval-dataset", text, "--eval", "both", "--eval-windows", windows,
               "--dtype", dtype, "--use-cpu", "--save", save, "--save-masks", "--force", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    report = json.load(open(f"{save}/run.json"))
    assert report["arithmetic"]["dtype"] == dtype, report["arithmetic"]
    with safe_open(f"{save}/masks.safetensors", "pt") as masks:
        return report, {key: masks.get_tensor(key) for key in masks.keys()}


def ones(tensor):
    return sum(bin(byte).count("1") for byte in tensor.flatten().tolist())


print("| checkpoint | stored as | method | dense, f32 | dense, bf16 | pruned, f32 | pruned, bf16 | apart | pruned weights that are the same |")
print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
os.makedirs(folder, exist_ok=True)
for name, flags in MODELS.items():
    for stored in ("bfloat16", "float16"):
        model = stored_as(stored, name)
        for method in ("wanda", "magnitude"):
            (f32, masks), (bf16, others) = run(model, flags, method, "f32"), run(model, flags, method, "bf16")
            same = sum(ones(masks[key] & others[key]) for key in masks)
            total = sum(ones(masks[key]) for key in masks)
            dense, pruned = [[report["perplexity"][side]["perplexity"] for report in (f32, bf16)] for side in ("dense", "pruned")]
            print(f"| {name} | {stored} | {method} | {dense[0]:.4f} | {dense[1]:.4f} | {pruned[0]:.4f} | {pruned[1]:.4f} | {100 * (pruned[1] / pruned[0] - 1):+.3f} % | {100 * same / total:.3f} % |", flush=True)

#!/usr/bin/env python3
"""Does Python load what `prune` wrote? Run by hand; `cargo test` does not need it.

    python3 -m venv venv && venv/bin/pip install torch==2.15.0 transformers==4.46.3 safetensors==0.8.0 numpy==2.4.6 sentencepiece==0.2.3 protobuf==7.36.2
    venv/bin/python tests/check_transformers.py SOURCE_DIR PRUNED_DIR --run RUN_DIR/run.json
    venv/bin/python tests/check_transformers.py SOURCE_DIR PRUNED_DIR --text FILE --seqlen 512 --windows 20

For what `prune merge` wrote, with transformers 5.23.0 and peft==0.21.2 instead:

    venv/bin/python tests/check_transformers.py BASE_DIR OUT/model --merged --run OUT/run.json
    venv/bin/python tests/check_transformers.py BASE_DIR OUT/model --folded ADAPTER_DIR

Python 3.10 or later; a CPU build of torch is enough. sentencepiece and protobuf are what transformers needs where a model's
tokenizer_config.json makes it build the tokenizer anew from tokenizer.model.

Checked with the `safetensors` package, shard by shard: the same files, tensor names, shapes and dtypes as the source, metadata
`format = "pt"`; every element has the source's bits or those of +0, and only decoder linears changed at all. With `--run`: zeros and
pruned weights per matrix, the masks' hashes where the source had no zeros of its own, N:M groups, and the files' SHA-256 as
`run.json` has them. Checked with `transformers`: model and tokenizer load without missing or unexpected tensors, logits are finite,
a few tokens are generated greedily, and with `--text` the perplexity over the first windows equals that of `prune eval` to a
relative 1e-4 (f32 on both sides, other kernels), on the same token ids.

With `--merged`, the second folder is a merge, and the comparison with the source's elements is left out: elements are finite, and
with `--run` shapes, zeros and SHA-256 are those of `run.json`. `--folded` names the adapter that was folded into the base; with
`--semantics peft`, that is OUT/adapter. peft loads it without missing or unexpected tensors, and its `merge_and_unload` gives the
merged model: each element within 1e-6 of the largest of its tensor where that is f32, else within the rounding of its dtype.

Prints one line per check and exits with 1 if any failed.
"""

import argparse
import hashlib
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy
import safetensors
import torch
import transformers
from safetensors import safe_open

LINEARS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
INDEX = "model.safetensors.index.json"
BINARY = Path(__file__).resolve().parent.parent / "target" / "release" / "prune"

failures = 0


def check(name, passed, detail=""):
    """One line per check; a failed one is remembered for the exit code."""
    global failures
    failures += not passed
    print(f"{'ok    ' if passed else 'FAILED'}  {name}{': ' if detail else ''}{detail}")


def shards(folder):
    """The weight files of a checkpoint, by name."""
    if (folder / INDEX).is_file():
        weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
        return sorted(set(weight_map.values()))
    return ["model.safetensors"]


def bits(tensor):
    """The elements as integers of their width: -0 differs from +0, and NaN equals itself."""
    return tensor.contiguous().view({4: torch.int32, 2: torch.int16}[tensor.element_size()])


def mask_sha256(mask):
    """SHA-256 of a mask [out, in], row-major without padding, least significant bit first."""
    return hashlib.sha256(numpy.packbits(mask.numpy().reshape(-1), bitorder="little").tobytes()).hexdigest()


def is_linear(name):
    return name.endswith(".weight") and name.removesuffix(".weight").endswith(LINEARS)


def check_files(source, pruned, run):
    """Everything the safetensors package can tell."""
    names = shards(source)
    check("same shards", names == shards(pruned), f"{len(names)} files")
    recorded = {}
    if run:
        recorded = {m["name"] + ".weight": m for layer in run["layers"] for m in layer["matrices"]}
        hashes = {f["file"]: f["sha256"] for f in run["output"]["verification"]["files"]}
        found = {name: hashlib.sha256((pruned / name).read_bytes()).hexdigest() for name in names}
        check("files' SHA-256 as in run.json", hashes == found)
    wrong_layout, wrong_format, changed, elsewhere, wrong_record = [], [], [], [], []
    tensors = elements = removed = zeros = in_linears = hashes_compared = 0
    for shard in names:
        with safe_open(source / shard, "pt") as before, safe_open(pruned / shard, "pt") as after:
            if (after.metadata() or {}).get("format") != "pt":
                wrong_format.append(shard)
            if sorted(before.keys()) != sorted(after.keys()):
                wrong_layout.append(shard)
                continue
            for name in before.keys():
                old, new = before.get_tensor(name), after.get_tensor(name)
                if old.shape != new.shape or old.dtype != new.dtype:
                    wrong_layout.append(name)
                    continue
                differs = bits(old) != bits(new)
                tensors, elements, removed = tensors + 1, elements + old.numel(), removed + int(differs.sum())
                if bool((bits(new)[differs] != 0).any()):
                    changed.append(name)
                if not is_linear(name):
                    elsewhere += [name] * bool(differs.any())
                    continue
                is_zero = new == 0
                zeros, in_linears = zeros + int(is_zero.sum()), in_linears + new.numel()
                if name not in recorded:
                    continue
                matrix = recorded.pop(name)
                right = [list(new.shape) == matrix["shape"], int(is_zero.sum()) == matrix["zeros"],
                         int((old == 0).sum()) == matrix["zeros_before"]]  # fmt: skip
                if matrix["pruned"] is None:
                    right.append(not bool(differs.any()))
                elif matrix["zeros_before"] == 0:
                    # Then the zeros are the mask.
                    right += [int(is_zero.sum()) == matrix["pruned"], mask_sha256(is_zero) == matrix["mask_sha256"]]
                    hashes_compared += 1
                kind = run["pruning"]["sparsity_type"]
                if kind != "unstructured" and matrix["pruned"] is not None:
                    n, m = map(int, kind.split(":"))
                    right.append(bool((is_zero.reshape(-1, m).sum(1) >= n).all()))
                wrong_record += [name] * (not all(right))
    check("same tensors, shapes and dtypes", not wrong_layout, ", ".join(wrong_layout) or f"{tensors} tensors")
    check('metadata format = "pt"', not wrong_format, ", ".join(wrong_format))
    check("every element is the source's or +0, bit for bit", not changed, ", ".join(changed) or f"{elements} elements, {removed} removed")
    check("nothing but decoder linears changed", not elsewhere, ", ".join(elsewhere))
    check("something was removed", removed > 0, f"sparsity of the decoder linears {zeros / max(in_linears, 1):.6f}")
    if run:
        wrong_record += list(recorded)
        check("zeros, masks and groups per matrix as in run.json", not wrong_record, ", ".join(wrong_record) or f"{hashes_compared} masks' hashes compared")
        ratio = run["sparsity"]["ratio"]
        check("overall sparsity as in run.json", math.isclose(ratio, zeros / in_linears, rel_tol=1e-12), f"{ratio:.6f}")


def check_merged_files(merged, run):
    """Everything the safetensors package can tell of a merge."""
    recorded = {}
    if run:
        recorded = {tensor["name"]: tensor for tensor in run["merge"]["tensors"]}
        hashes = {f["file"]: f["sha256"] for f in run["output"]["verification"]["files"]}
        found = {name: hashlib.sha256((merged / name).read_bytes()).hexdigest() for name in shards(merged)}
        check("files' SHA-256 as in run.json", hashes == found)
        adapter = run["merge"].get("combined_adapter")
        if adapter:
            hashes = {f["file"]: f["sha256"] for f in adapter["files"]}
            found = {name: hashlib.sha256((Path(adapter["folder"]) / name).read_bytes()).hexdigest() for name in hashes}
            check("the combined adapter's SHA-256 as in run.json", hashes == found)
    wrong_format, not_finite, wrong_record, tensors = [], [], [], 0
    for shard in shards(merged):
        with safe_open(merged / shard, "pt") as file:
            wrong_format += [shard] * ((file.metadata() or {}).get("format") != "pt")
            for name in file.keys():
                tensor, tensors = file.get_tensor(name), tensors + 1
                not_finite += [name] * (not bool(torch.isfinite(tensor).all()))
                if run:
                    of = recorded.pop(name, {"shape": None, "zeros": None})
                    right = list(tensor.shape) == of["shape"] and int((tensor == 0).sum()) == of["zeros"]
                    wrong_record += [name] * (not right)
    check('metadata format = "pt"', not wrong_format, ", ".join(wrong_format))
    check("every element is finite", not not_finite, ", ".join(not_finite) or f"{tensors} tensors")
    if run:
        wrong_record += list(recorded)
        check("shapes and zeros per tensor as in run.json", not wrong_record, ", ".join(wrong_record))


def check_folded(base, adapter, merged):
    """Folds the adapter by peft and compares."""
    import peft

    model = peft.PeftModel.from_pretrained(load(base)[0], adapter)
    weights = peft.utils.save_and_load.load_peft_weights(adapter)
    result = peft.set_peft_model_state_dict(model, weights)
    missing = [name for name in result.missing_keys if "lora_" in name]
    wrong = [f"missing {name}" for name in missing] + [f"unexpected {name}" for name in result.unexpected_keys]
    check(f"peft {peft.__version__} loads every tensor of the adapter", not wrong, ", ".join(wrong) or f"{len(weights)} tensors")
    folded, worst, differ = model.merge_and_unload().state_dict(), 0.0, []
    for shard in shards(merged):
        with safe_open(merged / shard, "pt") as file:
            for name in file.keys():
                ours = file.get_tensor(name)
                theirs = folded[name].float()
                # Half a unit in the last place of bf16 and of f16.
                limit = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[ours.dtype]
                off = float((ours.float() - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30))
                worst = max(worst, off)
                differ += [name] * (off > limit)
    check("the merge is peft's merge_and_unload", not differ, ", ".join(differ) or f"at most {worst:.1e} of the largest element")


def load(pruned):
    """Model (in f32) and tokenizer, as a user would."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(pruned, torch_dtype=torch.float32, output_loading_info=True)
    wrong = {key: value for key, value in info.items() if value}
    check("transformers loads every tensor", not wrong, f"{type(model).__name__} {wrong or ''}".strip())
    return model.eval(), transformers.AutoTokenizer.from_pretrained(pruned)


@torch.no_grad()
def check_generation(model, tokenizer):
    ids = tokenizer("Once upon a time", return_tensors="pt").input_ids
    check("logits are finite", bool(torch.isfinite(model(ids).logits).all()))
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0)
    check("greedy generation", out.shape[1] > ids.shape[1], json.dumps(tokenizer.decode(out[0], skip_special_tokens=True)))


@torch.no_grad()
def check_perplexity(model, tokenizer, pruned, text, seqlen, windows, binary):
    """exp of the mean over windows of the mean next-token loss, here and by `prune eval`."""
    with tempfile.TemporaryDirectory() as folder:
        command = [binary, "eval", "--model", pruned, "--eval-dataset", text, "--seqlen", seqlen, "--save", folder, "--text-cache", f"{folder}/cache"]
        command += ["--eval-windows", windows] if windows else []
        subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        record = json.loads((Path(folder) / "run.json").read_text())
    # newline="": Python would otherwise turn "\r\n" into "\n".
    with open(text, encoding="utf-8", newline="") as file:
        ids = tokenizer(file.read(), return_tensors="pt", verbose=False).input_ids[0]
    count = min(len(ids) // seqlen, windows or len(ids))
    ids = ids[: count * seqlen].view(count, seqlen)
    same = hashlib.sha256(ids.numpy().astype("<i4").tobytes()).hexdigest() == record["evaluation"]["tokens_sha256"]
    check("same token ids as prune eval", same, f"{count} windows of {seqlen}")
    losses = []
    for window in ids:
        logits = model(window[None]).logits[0, :-1].float()
        losses.append(torch.nn.functional.cross_entropy(logits, window[1:]).item())
    here, there = math.exp(sum(losses) / count), record["perplexity"]["dense"]["perplexity"]
    difference = abs(here / there - 1)
    check("perplexity as prune eval's", difference <= 1e-4, f"transformers {here:.6f}, prune {there:.6f}, relative difference {difference:.1e}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="SOURCE_DIR")
    parser.add_argument("pruned", type=Path, metavar="PRUNED_DIR", help="the model folder that was written")
    parser.add_argument("--run", type=Path, help="run.json of the run that wrote it")
    parser.add_argument("--merged", action="store_true", help="PRUNED_DIR is a merge")
    parser.add_argument("--folded", type=Path, metavar="ADAPTER_DIR", help="PRUNED_DIR is SOURCE_DIR with this adapter")
    parser.add_argument("--text", type=Path, help="plain text to compare perplexities on")
    parser.add_argument("--seqlen", type=int, default=512)
    parser.add_argument("--windows", type=int, default=0, help="only the first so many windows [default: all]")
    parser.add_argument("--prune", default=BINARY, help="the binary [default: target/release/prune]")
    args = parser.parse_args()
    print(f"python {sys.version.split()[0]}, torch {torch.__version__}, transformers {transformers.__version__}, safetensors {safetensors.__version__}")
    transformers.utils.logging.disable_progress_bar()
    run = json.loads(args.run.read_text()) if args.run else None
    if args.merged or args.folded:
        check_merged_files(args.pruned, run)
        if not args.folded:
            load(args.source)
    else:
        check_files(args.source, args.pruned, run)
    if args.folded:
        check_folded(args.source, args.folded, args.pruned)
    model, tokenizer = load(args.pruned)
    check_generation(model, tokenizer)
    if args.text:
        check_perplexity(model, tokenizer, args.pruned, args.text, args.seqlen, args.windows, args.prune)
    print(f"{failures} checks failed" if failures else "all checks passed")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()

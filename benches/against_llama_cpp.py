#!/usr/bin/env python3
"""Text of a half-pruned model by `prune generate` and by llama.cpp, alternately: tokens per second, as a table in Markdown.

    python benches/against_llama_cpp.py FOLDER [1b | 7b]     (by hand; numpy, safetensors, gguf; with torch and transformers, PyTorch too)

Makes a random checkpoint in bf16 of a real shape, prunes half of it by magnitude, and writes it as GGUF in bf16 and Q8_0 into FOLDER.
1b needs 12 GB of disk, 7b 40 GB. LLAMA names the folder of `llama-bench` and `llama-quantize` (built from the source package of
`llama-cpp-python`). PRUNE names a binary with the feature `synthetic`. THREADS="1 2", ROUNDS=3, TOKENS=16.
"""
import json, os, pathlib, statistics, struct, subprocess, sys, time

import gguf
import numpy

folder = pathlib.Path(sys.argv[1]).resolve()
shape = sys.argv[2] if len(sys.argv) > 2 else "1b"
llama = pathlib.Path(os.environ["LLAMA"])
prune = os.environ.get("PRUNE", "target/release/prune")
threads = os.environ.get("THREADS", "1 2").split()
rounds, tokens = int(os.environ.get("ROUNDS", "3")), int(os.environ.get("TOKENS", "16"))

SHAPES = {
    "1b": dict(hidden_size=2048, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=16),
    "7b": dict(hidden_size=4096, intermediate_size=11008, num_attention_heads=32, num_key_value_heads=32, num_hidden_layers=32),
}
NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
PARTS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}


def run(*words):
    return subprocess.run([str(word) for word in words], check=True, stdout=subprocess.PIPE, text=True).stdout


def make():
    """The dense checkpoint, the pruned model, and the dense model as GGUF."""
    dense, pruned = folder / shape, folder / f"{shape}-half"
    if not dense.exists():
        flags = [word for key, value in SHAPES[shape].items() for word in (f"--{key.replace('_', '-')}", value)]
        run(prune, "make-checkpoint", dense, *flags, "--vocab-size", 32000, "--max-position-embeddings", 2048, "--dtype", "bf16")
    if not pruned.exists():
        run(prune, "--model", dense, "--prune-method", "magnitude", "--sparsity-ratio", 0.5, "--eval", "none", "--use-cpu", "--save", pruned)
    stored, coded = folder / f"{shape}.gguf", folder / f"{shape}-q8_0.gguf"
    if not stored.exists():
        write_gguf(dense, stored)
    if not coded.exists():
        run(llama / "llama-quantize", stored, coded, "Q8_0")
    return dense, pruned / "model", stored, coded


def gguf_name(name):
    part = name.removesuffix(".weight")
    if part in NAMES:
        return NAMES[part] + ".weight"
    _, _, layer, rest = part.split(".", 3)
    return f"blk.{layer}.{PARTS[rest]}.weight"


def write_gguf(source, target):
    """The weights without a tokenizer, which llama-bench does not need."""
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for file in sorted(source.glob("*.safetensors")):
        with open(file, "rb") as raw:
            length = struct.unpack("<Q", raw.read(8))[0]
            header = json.loads(raw.read(length))
        content = numpy.memmap(file, dtype=numpy.uint8, mode="r")[8 + length :]
        header.pop("__metadata__", None)
        for name, tensor in header.items():
            values = content[slice(*tensor["data_offsets"])]
            if len(tensor["shape"]) == 1:
                writer.add_tensor(gguf_name(name), (values.view(numpy.uint16).astype(numpy.uint32) << 16).view(numpy.float32))
            else:
                rows, columns = tensor["shape"]
                writer.add_tensor(gguf_name(name), values.reshape(rows, 2 * columns), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def ours(model, count, *flags):
    words = [prune, "generate", model, "--bench", "--max-tokens", tokens, "--threads", count, "--use-cpu", "--json", "--prompt", "ab", *flags]
    return json.loads(run(*words))["tokens_per_second"]


def has_bf16():
    return "bf16 products" in run(prune, "--version")


def in_bf16(model, weights):
    return lambda count: ours(model, count, "--weights", weights, "--dtype", "bf16")


def theirs(model, count):
    words = [llama / "llama-bench", "-m", model, "-t", count, "-p", 0, "-n", tokens, "-r", 1, "-o", "json"]
    return json.loads(run(*words))[0]["avg_ts"]


def pytorch(model):
    """Loads the model once; a call with a count of threads gives tokens per second of `generate`, without the prompt."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    ids = torch.tensor([[256, 72]])

    def seconds(count):
        began = time.perf_counter()
        loaded.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
        return time.perf_counter() - began

    def rate(count):
        torch.set_num_threads(int(count))
        seconds(2)
        return tokens / (seconds(2 + tokens) - seconds(2))

    return rate


def main():
    folder.mkdir(parents=True, exist_ok=True)
    dense, pruned, stored, coded = make()
    sides = {
        "dense": lambda count: ours(dense, count, "--weights", "dense"),
        "compact": lambda count: ours(pruned, count, "--weights", "compact"),
        "int8": lambda count: ours(pruned, count, "--weights", "int8"),
        **({"dense, bf16": in_bf16(dense, "dense"), "compact, bf16": in_bf16(pruned, "compact")} if has_bf16() else {}),
        "llama.cpp, bf16": lambda count: theirs(stored, count),
        "llama.cpp, Q8_0": lambda count: theirs(coded, count),
    }
    try:
        sides["PyTorch, bf16"] = pytorch(dense)
    except ImportError:
        print("PyTorch is left out: torch or transformers is not installed", file=sys.stderr)
    print("| threads | " + " | ".join(sides) + " |\n|" + " --- |" * (1 + len(sides)), flush=True)
    for count in threads:
        rates = {name: [] for name in sides}
        for _ in range(rounds):
            for name, side in sides.items():
                rates[name].append(side(count))
        print(f"| {count} | " + " | ".join(f"{statistics.median(of):.1f}" for of in rates.values()) + " |", flush=True)


main()

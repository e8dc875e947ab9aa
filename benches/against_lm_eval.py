#!/usr/bin/env python3
"""Multiple-choice requests by `prune eval` and by lm-evaluation-harness, alternately: seconds after loading, as a table in Markdown.

    python benches/against_lm_eval.py FOLDER     (by hand; lm_eval 0.4.13, torch, transformers)

Makes a random checkpoint of TinyLlama's shape with 2 layers in FOLDER. The requests are those of the recorded tasks in PRUNE_SHARED, whose texts
both tokenize themselves. lm_eval runs its `hf` model with every batch size, and the fastest counts. PRUNE names a binary with the feature
`synthetic`. TASKS="arc_easy hellaswag winogrande", DTYPES="f32 bf16", THREADS=2, ROUNDS=2, BATCHES="1 8 32".
"""
import json, os, pathlib, shutil, statistics, subprocess, sys, time

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import PreTrainedTokenizerFast

folder = pathlib.Path(sys.argv[1]).resolve()
shared = pathlib.Path(os.environ.get("PRUNE_SHARED", "../shared")).resolve()
prune = os.environ.get("PRUNE", "target/release/prune")
setting = lambda name, default: os.environ.get(name, default).split()
tasks, dtypes = setting("TASKS", "arc_easy hellaswag winogrande"), setting("DTYPES", "f32")
threads, rounds = int(os.environ.get("THREADS", "2")), int(os.environ.get("ROUNDS", "2"))
batches = [int(size) for size in setting("BATCHES", "1 8 32")]
torch.set_num_threads(threads)


def make(dtype):
    model = folder / f"tinyllama-2-{dtype}"
    if not model.exists():
        flags = "--hidden-size 2048 --intermediate-size 5632 --num-attention-heads 32 --num-key-value-heads 4 --num-hidden-layers 2"
        flags += f" --vocab-size 32000 --max-position-embeddings 2048 --dtype {dtype}"
        subprocess.run([prune, "make-checkpoint", model, *flags.split()], check=True)
        for file in (shared / "data/tokenizers/llama2").iterdir():
            shutil.copy(file, model)
    return model


def requests(task):
    """The requests of a task as texts, in the order of the documents."""
    recorded = json.loads((shared / f"goldens/tasks/wikitext-llama-8m/{task}.json").read_text())
    documents = [document for of in recorded["tasks"].values() for document in of["documents"]]
    pairs = []
    for document in documents:
        contexts, continuations = document["contexts"], document["continuations"]
        count = max(len(contexts), len(continuations))
        pick = lambda texts, at: texts[min(at, len(texts) - 1)]
        pairs += [(pick(contexts, at), pick(continuations, at)) for at in range(count)]
    return pairs


def ours(model, task):
    save = folder / "ours"
    shutil.rmtree(save, ignore_errors=True)
    words = [prune, "eval", model, "--tasks", task, "--tasks-from", shared / "data/tasks", "--use-cpu", "--threads", threads, "--save", save]
    words += ["--max-memory", "cpu=8GiB", "--log-samples", folder / "ours.jsonl", "--quiet"]
    subprocess.run([str(word) for word in words], check=True, stdout=subprocess.DEVNULL)
    record = json.loads((save / "run.json").read_text())
    loading = sum(phase["seconds"] for phase in record["phases"] if phase["phase"] == "read")
    samples = [json.loads(line) for line in (folder / "ours.jsonl").read_text().splitlines()]
    return record["seconds"] - loading, samples


def theirs(lm, pairs):
    instances = [Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=at) for at, pair in enumerate(pairs)]
    began = time.perf_counter()
    answers = lm.loglikelihood(instances, disable_tqdm=True)
    return time.perf_counter() - began, [answer[0] for answer in answers]


print(f"torch {torch.__version__}, {threads} threads")
print("| task | dtype | requests | prune, s | lm_eval, s (batch size: median) | ratio | largest difference |")
print("| --- | --- | ---: | ---: | --- | ---: | ---: |")
for dtype in dtypes:
    model = make(dtype)
    precision = {"f32": "float32", "bf16": "bfloat16"}[dtype]
    # The file as it is: the tokenizer class of transformers 5 tokenizes texts that begin with a space otherwise.
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(model / "tokenizer.json"), bos_token="<s>", eos_token="</s>")
    load = lambda size: HFLM(pretrained=str(model), tokenizer=tokenizer, device="cpu", dtype=precision, batch_size=size)
    models = {size: load(size) for size in batches}
    for task in tasks:
        pairs, seconds = requests(task), {"prune": []}
        for _ in range(rounds):
            took, samples = ours(model, task)
            seconds["prune"].append(took)
            for size, lm in models.items():
                took, answers = theirs(lm, pairs)
                seconds.setdefault(size, []).append(took)
        own = [choice["log_likelihood"] for sample in samples for choice in sample["choices"]]
        difference = max(abs(one - other) for one, other in zip(own, answers, strict=True))
        median = {name: statistics.median(times) for name, times in seconds.items()}
        best = min(median[size] for size in batches)
        each = ", ".join(f"{size}: {median[size]:.1f}" for size in batches)
        print(f"| {task} | {dtype} | {len(pairs)} | {median['prune']:.1f} | {each} | {median['prune'] / best:.2f} | {difference:.1e} |", flush=True)

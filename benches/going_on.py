#!/usr/bin/env python3
"""What an interruption costs, and how fast a run stops.

    benches/going_on.py PRUNE FOLDER TEXT [7b]

PRUNE is a release build of the program, FOLDER is where checkpoints and runs of this script go (a few GiB), TEXT a folder of WikiText-2.
Part 1: a random checkpoint of 32 layers is pruned undisturbed, and killed after 20 layers and gone on with; the time of the second session is held
against one pass of each stream through 20 layers, all times from the run's own record. The same with magnitude, which has no samples.
Part 2, with `7b`: a random checkpoint of Llama-2-7B's shape, 2 layers, is sent SIGTERM at several moments; seconds until it has ended, and whether
the model in the end is the undisturbed one's. Prints two Markdown tables.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

LAYERS, KILLED_AFTER = 32, 20
SHAPE = ["--num-hidden-layers", str(LAYERS), "--hidden-size", "512", "--intermediate-size", "1408", "--num-attention-heads", "8", "--vocab-size", "4096"]
SHAPE_7B = ["--num-hidden-layers", "2", "--hidden-size", "4096", "--intermediate-size", "11008", "--num-attention-heads", "32", "--vocab-size", "32000"]


def make(prune, folder, shape):
    if not os.path.isdir(folder):
        subprocess.run([prune, "make-checkpoint", folder, "--dtype", "bf16", *shape], check=True, stderr=subprocess.DEVNULL)


def start(command):
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def finish(command):
    began = time.monotonic()
    code = subprocess.run(command, stdout=subprocess.DEVNULL).returncode
    assert code == 0, f"exit code {code}: {' '.join(command)}"
    return time.monotonic() - began


def record(run):
    with open(os.path.join(run, "run.json")) as file:
        return json.load(file)


def finished_layers(run):
    try:
        with open(os.path.join(run, "unfinished.json")) as file:
            return len(json.load(file)["layers"])
    except (OSError, ValueError):
        return 0


def sums(run):
    with open(os.path.join(run, "model", "SHA256SUMS")) as file:
        return file.read()


def seconds_of(manifest, names):
    return sum(phase["seconds"] for phase in manifest["phases"] if phase["phase"] in names)


def cost(prune, folder, text):
    model, run = os.path.join(folder, f"{LAYERS}-layers"), os.path.join(folder, "run")
    make(prune, model, SHAPE)
    evaluated = ["--eval", "both", "--eval-windows", "8", "--eval-dataset", f"wikitext2:{text}"]
    runs = {
        "wanda": ["--nsamples", "16", "--seqlen", "512", "--dataset", f"wikitext2:{text}", *evaluated],
        "magnitude": ["--prune-method", "magnitude", "--eval", "none"],
    }
    print(f"| method | undisturbed | second session | of it through the {KILLED_AFTER} layers again | checking them | one pass of each stream through {KILLED_AFTER} layers | both sessions / undisturbed | same files |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for method, flags in runs.items():
        command = [prune, "--model", model, "--sparsity-ratio", "0.5", "--use-cpu", "--save", run, "-q", *flags]
        shutil.rmtree(run, ignore_errors=True)
        finish(command)
        whole, expected = record(run), sums(run)
        passes = ["propagate", "evaluate dense", "evaluate pruned"]
        once = seconds_of(whole, passes[:1]) * KILLED_AFTER / (LAYERS - 1) + seconds_of(whole, passes[1:]) * KILLED_AFTER / LAYERS
        shutil.rmtree(run)
        process = start(command)
        while finished_layers(run) < KILLED_AFTER:
            assert process.poll() is None, "it ended too soon"
            time.sleep(0.002)
        process.kill()
        process.wait()
        with open(os.path.join(run, "unfinished.json")) as file:
            before = json.load(file)
        layers = len(before["layers"])
        finish(command)
        again = record(run)
        second = again["sessions"][1]
        in_second = lambda names: seconds_of(again, names) - seconds_of(before, names)
        # What the second session would have spent on its own layers alone.
        own = seconds_of(whole, passes[:1]) * (LAYERS - 1 - layers) / (LAYERS - 1) + seconds_of(whole, passes[1:]) * (LAYERS - layers) / LAYERS
        print(
            f"| {method} | {whole['seconds']:.1f} s | {second['seconds']:.1f} s, from layer {second['first_layer']} "
            f"| {in_second(passes) - own:.1f} s | {in_second(['check']):.2f} s | {once:.1f} s | {again['seconds'] / whole['seconds']:.2f} | {'yes' if sums(run) == expected else 'NO'} |",
            flush=True,
        )
    shutil.rmtree(run)


def stopping(prune, folder, text):
    model, run = os.path.join(folder, "7b-2"), os.path.join(folder, "run")
    make(prune, model, SHAPE_7B)
    command = [prune, "--model", model, "--sparsity-ratio", "0.5", "--use-cpu", "--save", run, "-q", "--nsamples", "4", "--seqlen", "2048"]
    command += ["--dataset", f"wikitext2:{text}", "--eval-dataset", f"wikitext2:{text}", "--eval-windows", "2"]
    shutil.rmtree(run, ignore_errors=True)
    whole = finish(command)
    expected = sums(run)
    print("\n| SIGTERM after | ended after | exit code | finished layers | same files in the end |")
    print("| --- | --- | --- | --- | --- |")
    for tenth in (1, 3, 4, 5, 7, 8, 9):
        shutil.rmtree(run)
        process = start(command)
        time.sleep(whole * tenth / 10)
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        code = process.wait()
        stopped, layers = time.monotonic() - began, finished_layers(run)
        if code != 0:
            finish(command)
        print(f"| {whole * tenth / 10:.0f} s of {whole:.0f} s | {stopped:.1f} s | {code} | {layers} | {'yes' if sums(run) == expected else 'NO'} |", flush=True)
    shutil.rmtree(run)


def main():
    prune, folder, text = sys.argv[1:4]
    os.makedirs(folder, exist_ok=True)
    cost(prune, folder, text)
    if "7b" in sys.argv[4:]:
        stopping(prune, folder, text)


if __name__ == "__main__":
    main()

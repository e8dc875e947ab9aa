#!/usr/bin/env python3
"""Writes tests/it/merging/methods.safetensors: results of mergekit's methods for each of their options. Run by hand.

    python3 -m venv venv && venv/bin/pip install torch==2.15.0 safetensors==0.8.0 numpy==2.4.6 mergekit==0.1.5
    venv/bin/python tests/merge_methods.py tests/it/merging/methods.safetensors

A case is a call of a method of mergekit 0.1.5 on a matrix and on a vector of random f32, on a CPU with AVX-512 (arcee_fusion has other
bits on other CPUs). The inputs follow from the numbers of a case, so the file has results and cases only: tensors `CASE/matrix` and
`CASE/vector`, and a JSON list of cases in its metadata. tests/it/merging/methods.rs reads it.
"""

import json
import sys

import numpy
import torch
from mergekit.merge_methods import registry
from mergekit.merge_methods.base import PerInputValues, TensorGroup
from safetensors.torch import save_file

MATRIX, VECTOR = (9, 37), (37,)


def random(seed, count, scale):
    """Multiples of scale / 2²⁴ between -scale / 2 and scale / 2, of a linear congruential generator."""
    state, values = seed, []
    for _ in range(count):
        state = (state * 1664525 + 1013904223) % 2**32
        values.append((state >> 8) / 2**24 - 0.5)
    return numpy.array(values, numpy.float32) * numpy.float32(scale)


def models(case, shape):
    """The first is the base. `spread` scales the difference of a model from it; a list has a factor of the first difference per model."""
    count = int(numpy.prod(shape))
    base = random(1, count, 0.5) if case["has_base_values"] else numpy.zeros(count, numpy.float32)
    experts = []
    for at in range(case["experts"]):
        copies = case["copies"]
        step = random(2, count, case["spread"]) * numpy.float32(copies[at]) if copies else random(2 + at, count, case["spread"])
        experts.append(base + step)
    return [torch.from_numpy(values).reshape(shape) for values in [base, *experts]]


def case(name, method, experts=2, is_based=True, weights=(), shared=(), spread=0.125, copies=(), has_base_values=True, matrix=MATRIX):
    return {
        "name": name,
        "method": method,
        "experts": experts,
        "is_based": is_based,
        "weights": list(weights),
        "shared": dict(shared),
        "spread": spread,
        "copies": list(copies),
        "has_base_values": has_base_values,
        "matrix": list(matrix),
    }


def nuslerp():
    forms = [
        ("tensor", {}),
        ("row", {"nuslerp_flatten": False}),
        ("column", {"nuslerp_flatten": False, "nuslerp_row_wise": True}),
        ("flat-wins", {"nuslerp_flatten": True, "nuslerp_row_wise": True}),
    ]
    for form, shared in forms:
        for is_based in (False, True):
            name = f"nuslerp-{form}-{'base' if is_based else 'zero'}"
            yield case(name, "nuslerp", is_based=is_based, weights=(0.3, 0.9), shared=shared)
    yield case("nuslerp-weights-cancel", "nuslerp", is_based=False, weights=(1.0, -1.0))
    yield case("nuslerp-parallel", "nuslerp", weights=(0.2, 0.6), copies=(1.0, 1.0))


def karcher():
    yield case("karcher", "karcher", experts=3, is_based=False)
    yield case("karcher-far", "karcher", experts=4, is_based=False, has_base_values=False, spread=1.0)
    yield case("karcher-with-base", "karcher", experts=2)
    for steps in (0, 1):
        yield case(f"karcher-steps-{steps}", "karcher", experts=3, copies=(1.0, 1.0, -0.5), shared={"max_iter": steps})
    yield case("karcher-tol", "karcher", experts=3, has_base_values=False, spread=1.0, shared={"tol": 0.2})
    yield case("karcher-one", "karcher", experts=1, is_based=False)


def multislerp():
    for is_based in (False, True):
        for normalize in (False, True):
            name = f"multislerp-{'base' if is_based else 'zero'}-{'normalized' if normalize else 'sum'}"
            shared = {"normalize_weights": normalize}
            yield case(name, "multislerp", experts=3, is_based=is_based, weights=(0.5, 0.7, 0.2), shared=shared)
    yield case("multislerp-eps", "multislerp", weights=(0.5, 0.7), shared={"eps": 0.25})
    yield case("multislerp-opposite", "multislerp", weights=(0.5, 0.5), has_base_values=False, copies=(1.0, -1.0))
    yield case("multislerp-one", "multislerp", experts=1, weights=(0.3,))


def others():
    for share in (0.0, 0.15, 0.5, 1.0):
        yield case(f"sce-{share}", "sce", experts=3, shared={"select_topk": share})
    yield case("sce-one", "sce", experts=1, shared={"select_topk": 0.5})
    yield case("sce-energies-are-small", "sce", spread=2**-10, shared={"select_topk": 0.7, "int8_mask": True})
    for t in (0.0, 0.001, 0.03):
        yield case(f"nearswap-{t}", "nearswap", experts=1, shared={"t": t})
    yield case("arcee_fusion", "arcee_fusion", experts=1)
    yield case("arcee_fusion-wide", "arcee_fusion", experts=1, matrix=(4, 1100))
    yield case("arcee_fusion-near", "arcee_fusion", experts=1, spread=2**-12)


def merged(case, shape):
    base, *experts = models(case, shape)
    tensors = [base, *experts] if case["is_based"] else experts
    ids = list(range(len(tensors)))
    group = TensorGroup.from_tensors(tensors, ids=ids, base_index=0 if case["is_based"] else None)
    parameters = dict(case["shared"])
    if case["weights"]:
        expert_ids = ids[1:] if case["is_based"] else ids
        parameters["weight"] = PerInputValues(list(zip(expert_ids, case["weights"])))
    (result,) = registry.get(case["method"])([group], parameters=parameters)
    return result.contiguous()


def main():
    cases = [*nuslerp(), *karcher(), *multislerp(), *others()]
    tensors = {}
    for of in cases:
        tensors[f"{of['name']}/matrix"] = merged(of, tuple(of["matrix"]))
        tensors[f"{of['name']}/vector"] = merged(of, VECTOR)
        assert all(torch.isfinite(tensors[f"{of['name']}/{form}"]).all() for form in ("matrix", "vector")), of["name"]
    save_file(tensors, sys.argv[1], metadata={"cases": json.dumps(cases)})
    print(f"{len(cases)} cases, {sum(tensor.numel() for tensor in tensors.values())} elements")


main()

"""Counts the loss tokens of conversations as transformers does: run by hand, with `python count.py`; writes tokenizer.json and masks.json.

Needs transformers and tokenizers. A mask is a list of runs, each with its first token and its number of tokens; null stands for a
conversation that the template refuses.
"""
import json
import pathlib
import re

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

HERE = pathlib.Path(__file__).parent
SPECIAL = [
    "<s>", "</s>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|im_start|>", "<|im_end|>",
    "<start_of_turn>", "<end_of_turn>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "[INST]", "[/INST]",
]
MERGES = [("Ċ", "Ċ"), ("h", "e"), ("Ġ", "a"), (".", "Ċ"), ("Ġ", "t"), ("Ġt", "he"), (">", "Ċ")]


def tokenizer():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(letters + ["".join(merge) for merge in MERGES])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    pattern = Regex(r"\s?\w+|[^\s\w]+\n*|\s+")
    split = pre_tokenizers.Split(pattern, "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    made.save(str(HERE / "tokenizer.json"), pretty=False)
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")


def runs(mask):
    found, start = [], None
    for at, marked in enumerate(mask + [0]):
        if marked and start is None:
            start = at
        if not marked and start is not None:
            found.append([start, at - start])
            start = None
    return found


def main():
    made = tokenizer()
    masks = {}
    for path in sorted(HERE.glob("*.jinja")):
        template = path.read_text().removesuffix("\n")
        unmarked = re.sub(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}", "", template)
        rows = []
        for conversation in json.loads((HERE / "conversations.json").read_text()):
            given = dict(conversation=conversation["messages"], tools=conversation.get("tools"))
            try:
                out = made.apply_chat_template(
                    **given, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
                )
            except Exception as error:  # a refusal of the template
                print(path.stem, "refuses:", type(error).__name__, error)
                rows.append(None)
                continue
            plain = made.apply_chat_template(**given, chat_template=unmarked, tokenize=True, return_dict=True)
            assert plain["input_ids"] == out["input_ids"], path
            rows.append({"tokens": len(out["input_ids"]), "loss": runs(out["assistant_masks"])})
        masks[path.stem] = rows
    lines = [f" {json.dumps(name)}: {json.dumps(rows)}" for name, rows in masks.items()]
    (HERE / "masks.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()

//! LoRA adapters of peft: read, checked, and added to the rows of a base model.

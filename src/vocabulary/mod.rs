//! One vocabulary for several models: the tokenizer of a merge, and the rows of each model's embedding for its tokens.

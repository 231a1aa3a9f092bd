"""Text <-> tokens: tokenizer, chat template, stream of text."""

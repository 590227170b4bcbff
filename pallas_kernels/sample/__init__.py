"""Drawing a token of each row from its logits, without sorting the vocabulary."""

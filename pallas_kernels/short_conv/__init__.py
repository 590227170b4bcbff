"""The causal convolution of single channels over the last tokens, for the tokens of prompts."""

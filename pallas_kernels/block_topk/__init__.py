"""The op block_topk; see ``api``."""

"""The op index_topk; see ``api``."""

"""HellaSwag's own preprocessing, for `hellaswag_200.yaml`; runs in lm-eval's interpreter."""

from lm_eval.tasks.hellaswag.utils import process_docs

__all__ = ["process_docs"]

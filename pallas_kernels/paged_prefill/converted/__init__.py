"""paged_prefill on 8-bit pages that are first converted to 16 bits."""

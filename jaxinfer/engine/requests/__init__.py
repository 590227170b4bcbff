"""What a request says and what comes back: prompts, checks, outputs."""

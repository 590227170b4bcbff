"""The gated delta rule over the chunks of prompts."""

"""Requests and their outputs: prompts, checks, points, scores, beams."""

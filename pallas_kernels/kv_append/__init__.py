"""Writes a step's keys and values into their pages."""

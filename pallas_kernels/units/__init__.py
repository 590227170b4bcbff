"""Copies units, rows of many arrays, to and from one block of memory."""

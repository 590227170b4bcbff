"""Executables beside the step: each packs its arguments, traces itself and bounds its memory."""

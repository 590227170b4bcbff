"""Runs compiled steps on the device."""

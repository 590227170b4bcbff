"""A step's tokens for the host, without asking the device for them."""

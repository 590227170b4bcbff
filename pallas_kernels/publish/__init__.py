"""A step's tokens for the host, without a copy through the driver."""

"""The sum of partial results over devices, by writes into each other's memory."""

"""The columns that several devices have of a matrix, by writes into each other's memory."""

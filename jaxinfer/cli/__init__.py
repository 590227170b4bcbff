"""Floor 7: the commands. Heavy packages are imported inside functions, so --help is instant."""

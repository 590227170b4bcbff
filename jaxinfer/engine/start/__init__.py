"""From settings to a running engine: plan, load, build, and progress of the start."""

"""How a layer mixes tokens: attention, and what else there will be."""

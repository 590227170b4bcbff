"""``jaxinfer chat``: a conversation in the terminal."""

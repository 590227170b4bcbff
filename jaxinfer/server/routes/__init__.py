"""The application: every route's handler, and what all handlers share."""

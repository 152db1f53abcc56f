"""A run: the session, the gatekeeper, the arms of an A/B."""

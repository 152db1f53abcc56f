"""Code of a run: the session, the gatekeeper, the arms of a comparison."""

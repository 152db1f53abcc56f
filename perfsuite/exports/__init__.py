"""Results as other programs read them: files only, no client of any service, so that nothing needs a token."""

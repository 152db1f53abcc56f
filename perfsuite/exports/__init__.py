"""Write results as files for other programs. No service is contacted, so no token is needed."""
